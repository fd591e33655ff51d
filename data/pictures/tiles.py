"""Cuts pictures beyond one square tile, and counts their tokens.

LLaVA-NeXT's `anyres` and LLaVA-OneVision's `anyres_max_9`: the best of a list of resolutions, the picture fitted into
it on black, cut into tiles; a first tile holds the whole picture squeezed. Everything here is arithmetic on sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from PIL import Image

from ...core.pictures import Picture, TileGrid

# The published training code and transformers read the list of resolutions as (width, height) and (height, width),
# so that ties fall differently, and round differently where a size meets an integer up to floating point.
Convention = Literal["hf", "original"]
Size = tuple[int, int]  # width, height

Aspect = Literal["square", "pad", "anyres", "anyres_max_9"]

SHRINK_ABOVE = 1.1  # OneVision shrinks grids whose side exceeds the cap's by more than this


def is_tiled(aspect: Aspect, num_images: int) -> bool:
    """Whether the pictures of a sample are cut into tiles."""
    return aspect == "anyres" or (aspect == "anyres_max_9" and num_images == 1)


@dataclass(frozen=True)
class Tiling:
    """A model family's tiling."""

    tile: int  # side of a tile in pixels
    patches: int  # patches along a side of a tile
    # Pairs of pixels as the family's list has them; `convention` says which of a pair is the width.
    resolutions: tuple[tuple[int, int], ...]
    convention: Convention = "hf"
    max_tiles: int | None = None  # grids larger than so many tiles are shrunk; None: never


def next_resolutions(tile: int) -> tuple[tuple[int, int], ...]:
    """LLaVA-NeXT's five: two tiles either way, four, three either way."""
    return tuple((a * tile, b * tile) for a, b in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)))


def onevision_resolutions(tile: int) -> tuple[tuple[int, int], ...]:
    """LLaVA-OneVision's: every grid of up to 6 x 6 tiles."""
    return tuple((a * tile, b * tile) for a in range(1, 7) for b in range(1, 7))


def best_resolution(size: Size, tiling: Tiling) -> Size:
    """The resolution (width, height) that keeps most of the picture's pixels, among those the one that wastes least."""
    width, height = size
    best, most, least = (0, 0), 0, math.inf
    for pair in tiling.resolutions:
        wide, high = pair if tiling.convention == "original" else (pair[1], pair[0])
        scale = min(wide / width, high / height)
        effective = min(int(width * scale) * int(height * scale), width * height)
        wasted = wide * high - effective
        if effective > most or (effective == most and wasted < least):
            best, most, least = (wide, high), effective, wasted
    return best


def tiled_picture(size: Size, tiling: Tiling) -> Picture:
    """The layout of a picture of `size` pixels (width, height)."""
    wide, high = best_resolution(size, tiling)
    down, across = high // tiling.tile, wide // tiling.tile
    rows, columns = unpadded = _without_padding(size, down * tiling.patches, across * tiling.patches, tiling.convention)
    if tiling.max_tiles is not None:
        ratio = math.sqrt(rows * columns / (tiling.max_tiles * tiling.patches**2))
        if ratio > SHRINK_ABOVE:
            rows, columns = int(rows // ratio), int(columns // ratio)
    grid = TileGrid((down, across), unpadded, (rows, columns))
    return Picture(tiling.patches, 1 + down * across, grid=grid, newline="grid")


def _without_padding(size: Size, rows: int, columns: int, convention: Convention) -> tuple[int, int]:
    """Patch rows and columns that hold picture. As much is cut off on both sides, so that one too many may remain."""
    width, height = size

    def whole(value: float) -> int:
        return int(round(value, 7)) if convention == "hf" else int(value)

    if width / height > columns / rows:
        rows -= 2 * ((rows - whole(height * (columns / width))) // 2)
    else:
        columns -= 2 * ((columns - whole(width * (rows / height))) // 2)
    return rows, columns


def cut(image: Image.Image, tiling: Tiling, resample: Image.Resampling | None) -> list[Image.Image]:
    """The squeezed picture and the tiles of its grid, row by row; black surrounds what does not fill the grid."""
    wide, high = best_resolution(image.size, tiling)
    scale_wide, scale_high = wide / image.width, high / image.height
    if scale_wide < scale_high:
        fitted = (wide, min(math.ceil(image.height * scale_wide), high))
    else:
        fitted = (min(math.ceil(image.width * scale_high), wide), high)
    canvas = Image.new("RGB", (wide, high))
    canvas.paste(image.resize(fitted, resample), ((wide - fitted[0]) // 2, (high - fitted[1]) // 2))
    return [image.resize((tiling.tile, tiling.tile), resample), *cells(canvas, tiling.tile)]


def cells(image: Image.Image, side: int) -> list[Image.Image]:
    """The squares of this side that a picture is made of, row by row."""
    corners = [(left, top) for top in range(0, image.height, side) for left in range(0, image.width, side)]
    return [image.crop((left, top, left + side, top + side)) for left, top in corners]
