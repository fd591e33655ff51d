"""Pictures as towers of Qwen-VL, Pixtral and Gemma 4 read them: whole, in patches.

Two frames of a Qwen-VL's clip are in one patch.

Sides are rounded to what becomes one token (patch x merge), within limits of pixels; a clip's frames have limits of
their own and share one for the whole clip. Everything but `patches` is arithmetic on sizes.
Letters: F frames, P patches, C channels, S side of a patch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from ...core.errors import UserError, first_line
from ...core.pictures import IMAGE, VIDEO, PatchGrid, Picture, whole_picture
from ..pictures.tiles import Size
from ..pictures.videos import Clip, VideoSettings
from .processor import Processor

_FRAMES = 2  # of a clip in one patch
_MOST_OBLONG = 200  # the published limit on a picture's sides


def rounded(size: Size, unit: int, least: int, most: int) -> Size:
    """Width and height in multiples of `unit`, of `least` to `most` pixels, about as oblong as before.

    Raises:
        UserError: one side is more than 200 times the other.
    """
    width, height = size
    if max(size) > _MOST_OBLONG * min(size):
        raise UserError(
            f"a picture of {width} x {height} pixels, and one side may be {_MOST_OBLONG} times the other",
            hint="cut or remove the picture",
        )
    wide, high = (round(side / unit) * unit for side in size)
    if wide * high > most:
        shrink = math.sqrt(width * height / most)
        return max(unit, math.floor(width / shrink / unit) * unit), max(unit, math.floor(height / shrink / unit) * unit)
    if wide * high < least:
        grow = math.sqrt(least / (width * height))
        return math.ceil(width * grow / unit) * unit, math.ceil(height * grow / unit) * unit
    return wide, high


def image_picture(
    size: Size, processor: Processor, *, min_pixels: int | None = None, max_pixels: int | None = None
) -> Picture:
    """The layout of an image of `size` pixels (width, height); limits that are None are the processor's."""
    if processor.family == "pixtral":
        return whole_picture(_grid(_shrunk(size, processor, min_pixels, max_pixels), processor), IMAGE)
    if processor.family == "gemma4":
        return whole_picture(_grid(_filled(size, processor, min_pixels, max_pixels), processor), IMAGE)
    limits = processor.image_processor.size
    least, most = min_pixels or limits["shortest_edge"], max_pixels or limits["longest_edge"]
    return whole_picture(_grid(rounded(size, processor.image_size, least, most), processor), IMAGE)


def _shrunk(size: Size, processor: Processor, least: int | None, most: int | None) -> Size:
    """Pixtral's way: never larger than the longest edge, sides cut to whole pixels and rounded up to whole tokens.

    Raises:
        UserError: a fewest number of pixels is asked for, or one side is more than 200 times the other.
    """
    if least is not None:
        raise UserError(f"min_pixels is {least}, and Pixtral's and Mistral 3's pictures are only ever made smaller",
                        hint="leave min_pixels out; max_pixels is honoured")  # fmt: skip
    width, height = size
    if max(size) > _MOST_OBLONG * min(size):
        raise UserError(f"a picture of {width} x {height} pixels, and one side may be {_MOST_OBLONG} times the other",
                        hint="cut or remove the picture")  # fmt: skip
    shrink = max(size) / processor.image_processor.size["longest_edge"]
    if most is not None:
        shrink = max(shrink, math.sqrt(width * height / most))
    unit = processor.image_size
    sides = [math.floor(side / shrink) if shrink > 1 else side for side in size]
    wide, high = (max(1, math.ceil(side / unit)) * unit for side in sides)
    return wide, high


def _filled(size: Size, processor: Processor, least: int | None, most: int | None) -> Size:
    """Gemma 4's way: as large as its number of tokens allows, whatever the picture's size, sides cut to whole tokens.

    Raises:
        UserError: a fewest number of pixels is asked for, or the picture is a line.
    """
    if least is not None:
        raise UserError(f"min_pixels is {least}, and Gemma 4's pictures all get as many tokens as they may have",
                        hint="leave min_pixels out; max_pixels is honoured")  # fmt: skip
    images, unit = processor.image_processor, processor.image_size
    count = images.max_soft_tokens if most is None else max(1, min(images.max_soft_tokens, most // unit**2))
    merge = unit // processor.patch_size
    try:
        high, wide = get_aspect_ratio_preserving_size(
            height=size[1], width=size[0], patch_size=processor.patch_size, max_patches=count * merge**2,
            pooling_kernel_size=merge,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"a picture of {size[0]} x {size[1]} pixels does not fit {count} tokens: {first_line(error)}",
                        hint="cut or remove the picture, or raise max_pixels") from error  # fmt: skip
    return wide, high


def clip_pictures(clip: Clip, settings: VideoSettings, processor: Processor) -> tuple[Picture, ...]:
    """The layout of a clip: one picture, or of Qwen3-VL one for each pair of frames, whose time is written before it.

    Raises:
        UserError: the clip does not say how many frames a second has, which positions or times are made of.
    """
    if processor.family in ("pixtral", "gemma4"):
        raise UserError("the record has a clip, and Pixtral, Mistral 3 and (here) Gemma 4 read images alone",
                        hint="use records without clips, or a target that reads them")  # fmt: skip
    unit, count = processor.image_size, len(clip.numbers)
    least, most = settings.pixel_limits(count, unit)
    size = rounded(clip.size, unit, least, most)
    grid = _grid(size, processor, frames=-(-count // _FRAMES), seconds=_FRAMES * clip.seconds_per_frame)
    if processor.family != "qwen3_vl":
        return (whole_picture(grid, VIDEO),)
    times = clip.seconds
    times += times[-1:] * (-count % _FRAMES)
    return tuple(
        whole_picture(
            PatchGrid(1, grid.rows, grid.columns, grid.merge, part=part, timestamp=(first + second) / 2), VIDEO
        )
        for part, (first, second) in enumerate(zip(times[::2], times[1::2], strict=True))
    )


def _grid(size: Size, processor: Processor, *, frames: int = 1, seconds: float = 1.0) -> PatchGrid:
    patch = processor.patch_size
    return PatchGrid(frames, size[1] // patch, size[0] // patch, processor.image_size // patch, seconds)


def patches(frames: Sequence[Image.Image], grid: PatchGrid, processor: Processor) -> Tensor:
    """Normalised patches [P,C*2*S*S] float32 of RGB frames, in the order of tokens: merged ones one after another; of
    Pixtral [P,C*S*S] and Gemma 4 [P,S*S*C], row by row.

    Args:
        frames: an image is one; an odd last one is doubled.
        grid: rows and columns of each frame.
    """
    images, side, merge = processor.image_processor, processor.patch_size, grid.merge
    size = grid.columns * side, grid.rows * side
    pixels = np.stack([np.asarray(frame.resize(size, images.resample), dtype=np.float32) for frame in frames])
    tensor = (torch.from_numpy(pixels) / 255 - torch.tensor(images.image_mean)) / torch.tensor(images.image_std)
    if processor.family in ("pixtral", "gemma4"):  # row by row, and no frames
        cut = tensor.view(grid.rows, side, grid.columns, side, 3)
        if processor.family == "gemma4":  # the colours of a pixel beside each other
            return cut.permute(0, 2, 1, 3, 4).reshape(-1, 3 * side * side)
        return cut.permute(0, 2, 4, 1, 3).reshape(-1, 3 * side * side)
    if len(tensor) % _FRAMES:
        tensor = torch.cat([tensor, tensor[-1:]])
    cut = tensor.view(
        len(tensor) // _FRAMES, _FRAMES, grid.rows // merge, merge, side, grid.columns // merge, merge, side, 3
    )
    return cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3 * _FRAMES * side * side)
