"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL (the last dense or a mixture of experts) as targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from ....core.batch import Request
from ....core.errors import Refused, UserError
from ....core.json_types import JsonObject
from ....core.pictures import PatchGrid, Picture, whole_picture
from ....core.positions import Resume
from ...inline import InlineModel, made
from ...parts import TokenIds
from ..family import Family, Pictures, Text
from ..language import LanguageTarget
from ..section import SeeingSection
from .model import QwenDecoder, QwenTraining, qwen_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class QwenPictures(Pictures):
    """Pictures that the tower reads whole, all of a prompt in one pass."""

    def fill(self, config: PreTrainedConfig, positions: int) -> tuple[list[Picture], tuple[int, ...]]:
        vision = config.vision_config
        merge, rows = vision.spatial_merge_size, max(1, isqrt(positions))
        grid = PatchGrid(1, rows * merge, max(1, positions // rows) * merge, merge)
        return [whole_picture(grid)], (grid.num_patches, 3 * vision.temporal_patch_size * vision.patch_size**2)


class QwenTarget(LanguageTarget):
    """Pictures that its tower reads whole, positions in three coordinates; of its decoder's settings `resume`."""

    decoder_class: ClassVar[type[QwenDecoder]] = QwenDecoder

    def view(self, request: Request) -> Request:
        if any(picture.whole is None for picture in request.pictures) or (
            request.pixels is not None and not request.pictures
        ):
            raise UserError(
                "the target reads pictures whole, in patches, and these are cut into tiles",
                where=request.name,
                hint="use the processor of a Qwen-VL for this target's requests",
            )
        return request


QWEN2 = Text(norms_input=True, qkv_bias=True)
QWEN3 = Text(norms_input=True, norms_heads=True, mrope_interleaved=True)
_VL2 = Text(norms_input=True, qkv_bias=True, mrope_section=(16, 24, 24))
_VL3 = Text(norms_input=True, norms_heads=True, mrope_section=(24, 20, 20), mrope_interleaved=True)
_STATES = {"vllm": ("eagle", "eagle3", "dflash"), "sglang": ("eagle3",)}


def _family(kind: str, model: str, texts: dict[str, Text], engines: dict[str, tuple[str, ...]]) -> Family:
    return Family(
        kind, model, QwenTraining, QwenTarget, QwenPictures(), texts=texts, engines=engines, is_compared=True,
        v1_misplaces_drafts=True,
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


class QwenSection(SeeingSection):
    """Settings of Qwen-VL and Qwen3.5."""

    # Inline configs of a target that a `train` stage with `model: target` makes from scratch; `model_type` of the first
    # may name qwen3_vl_moe_text or qwen3_5_moe_text.
    language_model: InlineModel | None = None
    vision_tower: JsonObject | None = None
    # Where text goes on after a clip. max_plus_one: one past the largest coordinate, as the weights were trained;
    # longer_side: what transformers 5.3 and later count in a prompt (their own decoding goes on elsewhere). The two
    # differ where a clip is longer in time than its frames are wide: see docs/decisions/departures.md.
    resume: Resume = "max_plus_one"

    @model_validator(mode="after")
    def _halves_fit(self) -> Self:
        if self.language_model is not None and self.vision_tower is not None:
            named = self.language_model["model_type"]
            known = [f"{name}_text" for name, family in self.families.items() if family.kind == self.base_kind]
            if named not in known:
                problem = f"a target of kind {self.base_kind} has none of model_type {named}"
                raise Refused("language_model.model_type", problem, f"write {' or '.join(known)}")
            from transformers import CONFIG_MAPPING

            config: Any = CONFIG_MAPPING[named.removesuffix("_text")]
            try:
                made(self.vision_tower, config.sub_configs["vision_config"])
            except Refused as refused:
                raise refused.under("vision_tower") from refused
        return self

    def inline_config(self, ids: TokenIds) -> PreTrainedConfig:
        assert self.language_model is not None and self.vision_tower is not None
        return qwen_config(self.base_kind, self.language_model, self.vision_tower, ids)

    def target(self, model: PreTrainedModel, *, num_token_ids: int, image_token_id: int | None) -> LanguageTarget:
        assert self.family is not None
        kind = self.family.target
        return kind(model, num_token_ids=num_token_ids, resume=self.resume, prefill_chunk=self.prefill_chunk)


class QwenTargetConfig(QwenSection):
    """A Qwen-VL target of any size."""

    families: ClassVar[Mapping[str, Family]] = FAMILIES

    # Qwen2-VL, Qwen2.5-VL or Qwen3-VL, whose mixture of experts is its kind, too.
    kind: Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
