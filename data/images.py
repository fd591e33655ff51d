"""Pictures to pixels exactly as the official recipes: one square tile, or several.

`square` is CLIP's own processing (shortest edge, centre crop; SigLIP's squeezes); `pad` first extends the picture to a
square with the mean colour, so that nothing is cut off (LLaVA-1.5, `image_aspect_ratio`). `anyres` (LLaVA-NeXT) cuts
every picture into tiles; `anyres_max_9` (LLaVA-OneVision) a picture that stands alone, and of several makes a padded
tile and a newline each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from ..core.errors import UserError
from ..core.pictures import Picture
from .embedded import MediaFile
from .processor import Processor
from .tiles import Convention, Size, Tiling, cut, next_resolutions, onevision_resolutions, tiled_picture

Aspect = Literal["square", "pad", "anyres", "anyres_max_9"]
_MAX_TILES = 9
# Listed because others run programs (EPS) or have never been looked at.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def load_image(path: MediaFile) -> Image.Image:
    """An RGB picture. Raises `UserError` naming the file where it is missing, broken or a decompression bomb."""
    with _opened(path) as image:
        return image.convert("RGB")


def image_size(path: MediaFile) -> Size:
    """Width and height, from the file's head. Raises as `load_image`."""
    with _opened(path) as image:
        return image.size


@contextmanager
def _opened(path: MediaFile) -> Iterator[Image.Image]:
    try:
        with path.open("rb") as file, Image.open(file, formats=_FORMATS) as image:
            yield image
    except FileNotFoundError as error:
        raise UserError(
            "missing image", where=str(path), hint="check the `images` folder of the data section"
        ) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"corrupt image: {error}", where=str(path), hint="replace or remove the file") from error


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
