"""Qwen3.5, dense or a mixture of experts, as a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from ....core.errors import Refused
from ....core.states import Taps
from ...decoding.decoder import DecoderStates, PromptRows
from ...packed_row import PackedRow
from ..family import Family
from ..qwen.model import QwenTraining
from ..qwen.section import QWEN3, QwenPictures, QwenSection, QwenTarget
from .decoder import HybridDecoder


class Qwen35Target(QwenTarget):
    """A Qwen-VL of whose layers some recur."""

    decoder_class = HybridDecoder

    def _run(self, prompts: PromptRows, row: PackedRow | None, taps: Taps) -> DecoderStates:
        # In one row with others a sample would begin with their recurrent states.
        return super()._run(prompts, None, taps)


# model_type -> record; the mixture of experts is of the dense model's kind.
FAMILIES = {
    name: Family(
        "qwen3_5", model, QwenTraining, Qwen35Target, QwenPictures(),
        texts={f"{name}_text": replace(QWEN3, ships_mtp=True)}, unread=("vllm", "sglang"), is_compared=True,
        v1_misplaces_drafts=True,
    )
    for name, model in (
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"), ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    )
}  # fmt: skip


class Qwen35TargetConfig(QwenSection):
    """A Qwen3.5 target of any size."""

    families: ClassVar[Mapping[str, Family]] = FAMILIES

    # Qwen3.5; its mixture of experts is its kind, too.
    kind: Literal["qwen3_5"]

    @model_validator(mode="after")
    def _not_offloaded(self) -> Self:
        if self.offload is not None:
            problem = "recurrent layers read weights beside their modules, which are not fetched from the host"
            raise Refused("offload", problem, "leave the key out: use more GPUs, or a smaller target")
        return self
