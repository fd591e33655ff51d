"""What the rest of draftsmith asks of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, and of Qwen's language models."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import TYPE_CHECKING

from ....core.pictures import PatchGrid, Picture, whole_picture
from ..family import Family, Pictures, Text
from .decoder import QwenDecoder
from .training import QwenTraining

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class QwenPictures(Pictures):
    """Pictures that the tower reads whole, all of a prompt in one pass."""

    def fill(self, config: PreTrainedConfig, positions: int) -> tuple[list[Picture], tuple[int, ...]]:
        """One picture."""
        vision = config.vision_config
        merge, rows = vision.spatial_merge_size, max(1, isqrt(positions))
        grid = PatchGrid(1, rows * merge, max(1, positions // rows) * merge, merge)
        return [whole_picture(grid)], (grid.num_patches, 3 * vision.temporal_patch_size * vision.patch_size**2)


QWEN2 = Text(norms_input=True, qkv_bias=True)
QWEN3 = Text(norms_input=True, norms_heads=True, mrope_interleaved=True)
_VL2 = Text(norms_input=True, qkv_bias=True, mrope_section=(16, 24, 24))
_VL3 = Text(norms_input=True, norms_heads=True, mrope_section=(24, 20, 20), mrope_interleaved=True)
_STATES = {"vllm": ("eagle", "eagle3", "dflash"), "sglang": ("eagle3",)}


def _family(kind: str, model: str, texts: dict[str, Text], engines: dict[str, tuple[str, ...]]) -> Family:
    return Family(
        kind, model, QwenTraining, QwenDecoder, QwenPictures(), texts=texts, engines=engines, is_compared=True,
        is_misplaced_in_v1=True,
    )  # fmt: skip


# model_type -> record; the mixture of experts is of its dense model's kind.
FAMILIES = {
    "qwen2_vl": _family(
        "qwen2_vl", "Qwen2VLForConditionalGeneration",
        {"qwen2_vl_text": _VL2, "qwen2": QWEN2, "qwen2_moe": QWEN2}, {},
    ),
    "qwen2_5_vl": _family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {"qwen2_5_vl_text": _VL2}, _STATES),
    "qwen3_vl": _family(
        "qwen3_vl", "Qwen3VLForConditionalGeneration",
        {"qwen3_vl_text": replace(_VL3, lacks_parallel_plan=True), "qwen3": QWEN3, "qwen3_moe": QWEN3}, _STATES,
    ),
    "qwen3_vl_moe": _family("qwen3_vl", "Qwen3VLMoeForConditionalGeneration", {"qwen3_vl_moe_text": _VL3}, _STATES),
}  # fmt: skip
