"""Pictures to pixels exactly as the official recipes: one square tile, or several.

`square` is CLIP's own processing (shortest edge, centre crop; SigLIP's squeezes); `pad` first extends the picture to a
square with the mean colour, so that nothing is cut off (LLaVA-1.5, `image_aspect_ratio`). `anyres` (LLaVA-NeXT) cuts
every picture into tiles; `anyres_max_9` (LLaVA-OneVision) a picture that stands alone, and of several makes a padded
tile and a newline each. InternVL cuts every picture by its own rule, whatever the aspect (`own_layouts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from ...core.errors import UserError
from ...core.pictures import Picture
from ..pictures.picture_files import MAX_CANVAS, check_area
from ..pictures.tiles import (
    Convention,
    Size,
    Tiling,
    cut,
    cut_own,
    next_resolutions,
    onevision_resolutions,
    own_tiles,
    tiled_picture,
)
from .processor import Processor

Aspect = Literal["square", "pad", "anyres", "anyres_max_9"]
# The fewest and the most pixels of a picture whose size decides; None: as the processor's files say.
Limits = tuple[int | None, int | None]
_MAX_TILES = 9


def check_canvas(size: Size, processor: Processor, aspect: Aspect, *, num_images: int = 1) -> None:
    """Raises `BadMedia` where too large a picture stands between one of `size` (width, height) and its tile.

    That is the picture itself, or the square of its longer side on which `pad` puts it; and CLIP's own way resizes the
    shorter side and leaves the other one long.
    """
    if processor.sizes_decide or is_tiled(aspect, num_images):
        return  # the sizes on the way are those of a list, or within pixel limits
    width, height = size
    edge = processor.image_processor.size.get("shortest_edge")
    if aspect != "square":
        side = max(size)
        check_area((side, side), MAX_CANVAS, f"the square around {width:,} x {height:,} pixels has")
        return
    check_area(size, MAX_CANVAS)
    if edge is not None:
        long = edge * max(size) // min(size)
        check_area((edge, long), MAX_CANVAS, f"{width:,} x {height:,} pixels, resized to a shorter side of {edge}, are")


def expand_to_square(image: Image.Image, mean: tuple[float, ...]) -> Image.Image:
    """The picture centred on a square canvas of its longer side, filled with the mean colour."""
    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    canvas = Image.new("RGB", (side, side), tuple(int(channel * 255) for channel in mean))
    canvas.paste(image, ((side - width) // 2, (side - height) // 2))
    return canvas


def tiling(processor: Processor, aspect: Aspect, convention: Convention) -> Tiling:
    """What `aspect` cuts with: the family's resolutions by the processor's files, or its usual ones."""
    tile = processor.image_size
    if aspect == "anyres":
        family, usual, cap = "llava_next", next_resolutions(tile), None
    else:
        family, usual, cap = "llava_onevision", onevision_resolutions(tile), _MAX_TILES
    own = processor.resolutions if processor.family == family else ()
    return Tiling(tile, processor.patches, own or usual, convention, cap)


def is_tiled(aspect: Aspect, num_images: int) -> bool:
    """Whether the pictures of a sample are cut into tiles."""
    return aspect == "anyres" or (aspect == "anyres_max_9" and num_images == 1)


def layouts(
    sizes: Sequence[Size], processor: Processor, aspect: Aspect, convention: Convention = "hf"
) -> tuple[Picture, ...]:
    """How the pictures of one sample become tiles and tokens, from their sizes (width, height) alone."""
    if is_tiled(aspect, len(sizes)):
        scheme = tiling(processor, aspect, convention)
        return tuple(tiled_picture(size, scheme) for size in sizes)
    return (Picture(processor.patches, newline="one_token" if aspect == "anyres_max_9" else "none"),) * len(sizes)


def own_grid(size: Size, processor: Processor, limits: Limits) -> tuple[int, int]:
    """Tiles across and down of a picture of an InternVL, whose limits of pixels are limits of tiles.

    Raises:
        UserError: the fewest are more than the most.
    """
    images, area = processor.image_processor, processor.image_size**2
    least = images.min_patches if limits[0] is None else -(-limits[0] // area)
    most = images.max_patches if limits[1] is None else max(1, limits[1] // area)
    if least > most:
        raise UserError(f"a picture has at least {least} and at most {most} tiles of {area:,} pixels",
                        hint="set min_pixels and max_pixels so that a number of tiles lies between them")  # fmt: skip
    return own_tiles(size, processor.image_size, least=least, most=most)


def own_layouts(sizes: Sequence[Size], processor: Processor, limits: Limits) -> tuple[Picture, ...]:
    """The layouts of an InternVL's pictures, from their sizes (width, height) alone."""
    counts = [math.prod(own_grid(size, processor, limits)) for size in sizes]
    return tuple(Picture(processor.patches, count + (count > 1)) for count in counts)


def own_pixels(images: Sequence[Image.Image], processor: Processor, limits: Limits) -> Tensor:
    """Normalised pixels [I,3,S,S] float32 of an InternVL's tiles, as `own_layouts` counts them."""
    side, resample = processor.image_size, processor.image_processor.resample
    tiles = [
        tile for image in images for tile in cut_own(image, own_grid(image.size, processor, limits), side, resample)
    ]
    return pixels(tiles, processor, "square")


def pixels(
    images: Sequence[Image.Image], processor: Processor, aspect: Aspect, convention: Convention = "hf"
) -> Tensor:
    """Normalised pixels [I,3,S,S] float32 of the tiles of one sample's pictures, as `layouts` counts them."""
    make, mean = processor.image_processor, tuple(processor.image_processor.image_mean)
    if is_tiled(aspect, len(images)):
        scheme = tiling(processor, aspect, convention)
        tiles = [tile for image in images for tile in cut(image, scheme, make.resample)]
    else:
        tiles = [image if aspect == "square" else expand_to_square(image, mean) for image in images]
    return torch.from_numpy(make(images=tiles, return_tensors="np")["pixel_values"]).float()
