"""What the rest of draftsmith asks of Qwen3.5."""

from __future__ import annotations

from dataclasses import replace

from ..family import Family
from ..qwen.family import QWEN3, QwenPictures
from ..qwen.training import QwenTraining
from .decoder import HybridDecoder

# model_type -> record; the mixture of experts is of the dense model's kind.
FAMILIES = {
    name: Family(
        "qwen3_5", model, QwenTraining, HybridDecoder, QwenPictures(),
        texts={f"{name}_text": replace(QWEN3, ships_mtp=True)}, unread=("vllm", "sglang"), is_compared=True,
        is_misplaced_in_v1=True,
    )
    for name, model in (
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"), ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    )
}  # fmt: skip
