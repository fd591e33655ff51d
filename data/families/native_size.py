"""Families whose towers read pictures whole, in patches: what Qwen-VL, Pixtral and Gemma 4 share.

Sides are multiples of what becomes one token (patch x merge). Everything but `patches` is arithmetic on sizes.
Letters: F frames, P patches, C channels, S side of a patch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...core.errors import UserError
from ...core.pictures import IMAGE, PatchGrid, Picture, whole_picture
from ..pictures.tiles import Size
from ..pictures.videos import Clip, VideoSettings
from .processor import PictureFamily, Processor, Resizing

_MOST_OBLONG = 200  # the published limit on a picture's sides


@dataclass(frozen=True)
class NativeSizeFamily(PictureFamily, ABC):
    """A family that reads pictures whole, and no clips."""

    reads_whole: bool = True
    sizes_decide: bool = True

    @abstractmethod
    def resized(self, size: Size, processor: Processor, least: int | None, most: int | None) -> Size:
        """Width and height that a picture is resized to, of `least` to `most` pixels; None: as the files say."""

    def ordered(self, frames: Tensor, grid: PatchGrid, side: int) -> Tensor:
        """Patches [P,C*S*S] of normalised frames [F,rows*S,columns*S,C], in the order of tokens: row by row."""
        return frames.view(grid.rows, side, grid.columns, side, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3 * side * side)

    def layouts(self, sizes: Sequence[Size], processor: Processor, resizing: Resizing) -> tuple[Picture, ...]:
        resized = (self.resized(size, processor, *resizing.limits) for size in sizes)
        return tuple(whole_picture(grid_of(size, processor), IMAGE) for size in resized)

    def pixels(
        self, images: Sequence[Image.Image], layouts: Sequence[Picture], processor: Processor, resizing: Resizing
    ) -> list[Tensor]:
        return [self.clip_pixels([image], picture, processor) for image, picture in zip(images, layouts, strict=True)]

    def clip_layout(self, clip: Clip, settings: VideoSettings, processor: Processor) -> tuple[Picture, ...]:
        raise UserError(f"the record has a clip, and processors of {self.name} read images alone",
                        hint="use records without clips, or a target that reads them")  # fmt: skip

    def clip_pixels(self, frames: Sequence[Image.Image], layout: Picture, processor: Processor) -> Tensor:
        """Patches [P,C*S*S], in the order of tokens."""
        assert layout.whole is not None
        grid, images, side = layout.whole, processor.image_processor, processor.patch_size
        size = grid.columns * side, grid.rows * side
        pixels = np.stack([np.asarray(frame.resize(size, images.resample), dtype=np.float32) for frame in frames])
        tensor = (torch.from_numpy(pixels) / 255 - torch.tensor(images.image_mean)) / torch.tensor(images.image_std)
        return self.ordered(tensor, grid, side)


def grid_of(size: Size, processor: Processor, *, frames: int = 1, seconds: float = 1.0) -> PatchGrid:
    """The patches of a picture resized to `size` pixels (width, height)."""
    patch = processor.patch_size
    return PatchGrid(frames, size[1] // patch, size[0] // patch, processor.image_size // patch, seconds)


def check_oblong(size: Size) -> None:
    """Raises `UserError` where one side is more than 200 times the other."""
    width, height = size
    if max(size) > _MOST_OBLONG * min(size):
        problem = f"a picture of {width} x {height} pixels, and one side may be {_MOST_OBLONG} times the other"
        raise UserError(problem, hint="cut or remove the picture")
