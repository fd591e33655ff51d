"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: pictures read whole, two frames of a clip in one patch.

Sides are rounded to what becomes one token, within limits of pixels (`rounded`: 640 x 480 becomes 644 x 476 in
Qwen2.5-VL, 23 x 17 tokens of 28 x 28 pixels); a clip's frames have limits of their own and share one for the
whole clip.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject
from ...core.pictures import VIDEO, PatchGrid, Picture, mark_of, whole_picture
from ..pictures.tiles import Size
from ..pictures.videos import Clip, FrameTokens, VideoSettings
from .native_size import NativeSizeFamily, check_oblong, grid_of
from .processor import CLIP_STATISTICS, SIGLIP_STATISTICS, Files, Processor, add_marks, mark_ids, pil, text_processor
from .prompt_templates import CHATML

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_WRITTEN = re.compile(r"<\|vision_start\|><\|(?:image|video)_pad\|><\|vision_end\|>")
_FRAMES = 2  # of a clip in one patch


@dataclass(frozen=True)
class QwenFamily(NativeSizeFamily):
    """A Qwen-VL."""

    limits: tuple[int, int] = (3136, 12845056)  # the fewest and the most pixels of a picture, of the published files
    is_clips: bool = True  # channels are normalised as CLIP's in the published files, and not as SigLIP's
    writes_times: bool = False  # before the frames of a clip, each pair of which is a picture of its own

    @property
    def _limits(self) -> dict[str, int]:
        return {"shortest_edge": self.limits[0], "longest_edge": self.limits[1]}

    def resized(self, size: Size, processor: Processor, least: int | None, most: int | None) -> Size:
        limits = processor.image_processor.size
        return rounded(size, processor.image_size, least or limits["shortest_edge"], most or limits["longest_edge"])

    def clip_layout(self, clip: Clip, settings: VideoSettings, processor: Processor) -> tuple[Picture, ...]:
        """One picture, or of Qwen3-VL one for each pair of frames, which bears its time."""
        unit, count = processor.image_size, len(clip.numbers)
        size = rounded(clip.size, unit, *settings.pixel_limits(count, unit))
        grid = grid_of(size, processor, frames=-(-count // _FRAMES), seconds=_FRAMES * clip.seconds_per_frame)
        if not self.writes_times:
            return (whole_picture(grid, VIDEO),)
        times = clip.seconds
        times += times[-1:] * (-count % _FRAMES)
        return tuple(
            whole_picture(
                PatchGrid(1, grid.rows, grid.columns, grid.merge, part=part, timestamp=(first + second) / 2), VIDEO
            )
            for part, (first, second) in enumerate(zip(times[::2], times[1::2], strict=True))
        )

    def ordered(self, frames: Tensor, grid: PatchGrid, side: int) -> Tensor:
        """[P,C*2*S*S]: merged patches one after another. An odd last frame is doubled."""
        merge = grid.merge
        if len(frames) % _FRAMES:
            frames = torch.cat([frames, frames[-1:]])
        cut = frames.view(
            len(frames) // _FRAMES, _FRAMES, grid.rows // merge, merge, side, grid.columns // merge, merge, side, 3
        )
        return cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3 * _FRAMES * side * side)

    def frame_tokens(
        self, settings: VideoSettings, processor: Processor, sizes: Sequence[Size], num_frames: int
    ) -> FrameTokens:
        """The median of the clips' tokens counts, two frames merged into one step."""
        unit = processor.image_size
        limits = settings.pixel_limits(num_frames, unit)
        resized = [rounded(size, unit, *limits) for size in sizes]
        return FrameTokens(statistics.median_low(w * h // unit**2 for w, h in resized), frames_per_step=_FRAMES)

    def counted(self, config: PreTrainedConfig, tower: PreTrainedConfig) -> tuple[int, int, Any]:
        return tower.patch_size * tower.spatial_merge_size, tower.patch_size, SimpleNamespace(size=self._limits)

    def marks(self, pictures: Sequence[Picture]) -> list[str]:
        texts: list[str] = []
        for picture in pictures:
            assert picture.whole is not None, "template qwen_vl is of pictures that are read whole"
            time = picture.whole.timestamp
            shown = f"<|vision_start|>{mark_of(picture)}<|vision_end|>"
            shown = shown if time is None else f"<{time:.1f} seconds>{shown}"
            if picture.whole.part:
                texts[-1] += shown
            else:
                texts.append(shown)
        return texts

    def published(self, vision: JsonMapping) -> JsonObject:
        patches = {"patch_size": vision.get("patch_size"), "merge_size": vision.get("spatial_merge_size", 2)}
        return {**(CLIP_STATISTICS if self.is_clips else SIGLIP_STATISTICS), "size": self._limits, **patches}

    def read(self, files: Files) -> Processor:
        return self.processor(files.tokenizer, files.images("Qwen2VL"), files.key)

    def processor(self, tokenizer: PreTrainedTokenizerFast, images: Any, key: str) -> Processor:
        """The family's processor. Raises `UserError` where files do not fit; `key` names them."""
        image, video, start, end = mark_ids(tokenizer, MARKS, key, "a Qwen-VL's")
        if images.temporal_patch_size != _FRAMES:
            raise UserError(f"{key}: {images.temporal_patch_size} frames make a patch, expected 2", hint="report this")
        return replace(
            text_processor(tokenizer, key), image_processor=images, image_token_id=image, patch_size=images.patch_size,
            image_size=images.patch_size * images.merge_size, picture_family=self, video_token_id=video,
            vision_start_id=start, vision_end_id=end,
        )  # fmt: skip

    def new(
        self, tokenizer: PreTrainedTokenizerFast, kind: str = "", *, patch_size: int,
        image_size: int = 0, merge: int = 2, min_pixels: int = 0, max_pixels: int = 0, **statistics: Any,
    ) -> Processor:  # fmt: skip
        """Pictures have at least one token and at most `image_size` squared pixels, where limits are 0."""
        add_marks(tokenizer, *MARKS, "<|im_start|>", "<|im_end|>")
        tokenizer.eos_token = "<|im_end|>"
        # Processors of transformers and vLLM expand this token; where it says another, they silently expand none.
        tokenizer.image_token = MARKS[0]
        least = min_pixels or (merge * patch_size) ** 2
        size = {"shortest_edge": least, "longest_edge": max_pixels or max(least, image_size**2)}
        images = pil("Qwen2VL")(patch_size=patch_size, merge_size=merge, size=size, **statistics)
        return self.processor(tokenizer, images, "a new processor")


QWEN_VL = replace(CHATML, name="qwen_vl", surrounds=True)
QWEN2_VL = QwenFamily("qwen2_vl", "Qwen2VLProcessor", (QWEN_VL,), written=_WRITTEN)
QWEN2_5_VL = replace(QWEN2_VL, name="qwen2_5_vl", processor_class="Qwen2_5_VLProcessor")
# transformers gives Qwen3.5 the processor of Qwen3-VL.
QWEN3_VL = QwenFamily(
    "qwen3_vl", "Qwen3VLProcessor", (QWEN_VL,), ("qwen3_5",), _WRITTEN, system="", limits=(65536, 16777216),
    is_clips=False, writes_times=True,
)  # fmt: skip


def rounded(size: Size, unit: int, least: int, most: int) -> Size:
    """Width and height in multiples of `unit`, of `least` to `most` pixels, about as oblong as before."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    check_oblong(size)  # in our words
    width, height = size
    high, wide = smart_resize(height, width, unit, least, most)
    return wide, high
