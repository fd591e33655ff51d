"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 (the last two dense and mixture of experts) as targets."""

from __future__ import annotations

from typing import Any, cast

from pydantic import model_validator
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ....core.batch import Request
from ....core.errors import UserError, did_you_mean
from ....core.positions import Resume
from ....core.refused import Refused
from ....core.states import Taps
from ...decoding.decoder import DecoderStates, PromptRows
from ...hub import recurrent_layers
from ...inline import InlineModel, InlinePart, check_part
from ...packed_row import PackedRow
from ...parts import TokenIds
from ..language import LanguageTarget
from ..qwen35.decoder import HybridDecoder
from ..section import TargetSection, refuse_kind
from .decoder import QwenDecoder
from .model import QWEN_FAMILIES, QWEN_KINDS, QwenKind, qwen_config


class QwenTargetConfig(TargetSection):
    """A Qwen-VL target of any size."""

    # Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3.5; the mixtures of experts of the last two are their kind, too.
    kind: QwenKind
    # Inline configs of a target that a `train` stage with `model: target` makes from scratch; `model_type` of the first
    # may name qwen3_vl_moe_text or qwen3_5_moe_text.
    language_model: InlineModel | None = None
    vision_tower: InlinePart | None = None
    # Where text goes on after a clip. max_plus_one: one past the largest coordinate, as the weights were trained;
    # longer_side: what transformers 5.3 and later count in a prompt (their own decoding goes on elsewhere). The two
    # differ where a clip is longer in time than its frames are wide: see docs/decisions/0012.
    resume: Resume = "max_plus_one"

    @model_validator(mode="after")
    def _one_source(self) -> QwenTargetConfig:
        self.check_one_source(self.language_model, self.vision_tower)
        if self.language_model is not None and self.vision_tower is not None:
            named, own = self.language_model["model_type"], [f"{family}_text" for family in QWEN_KINDS[self.base_kind]]
            if named not in own:
                problem = f"a target of kind {self.base_kind} has none of model_type {named}"
                raise Refused("language_model.model_type", problem, f"write {' or '.join(own)}")
            config: Any = QWEN_FAMILIES[named.removesuffix("_text")][0]
            check_part(self.vision_tower, config.sub_configs["vision_config"], "vision_tower")
        if self.base_kind == "qwen3_5" and self.offload is not None:
            problem = "recurrent layers read weights beside their modules, which are not fetched from the host"
            raise Refused("offload", problem, "leave the key out: use more GPUs, or a smaller target")
        return self

    def inline_config(self, ids: TokenIds) -> PreTrainedConfig:
        assert self.language_model is not None and self.vision_tower is not None
        return qwen_config(self.base_kind, self.language_model, self.vision_tower, ids)

    def new(self, config: PreTrainedConfig) -> PreTrainedModel:
        return QWEN_FAMILIES[config.model_type][1](config).float()

    def model_class(self, model_type: str, source: str) -> Any:
        if model_type not in QWEN_KINDS[self.base_kind]:
            kinds = [kind for kind, types in QWEN_KINDS.items() if model_type in types]
            hint = f"write kind: {kinds[0]}" if kinds else did_you_mean(model_type, [*QWEN_FAMILIES])
            refuse_kind(source, model_type, " or ".join(QWEN_KINDS[self.base_kind]), hint)
        return QWEN_FAMILIES[model_type][1]

    def target(self, model: PreTrainedModel, *, num_token_ids: int, image_token_id: int | None) -> QwenTarget:
        return QwenTarget(model, num_token_ids=num_token_ids, resume=self.resume, prefill_chunk=self.prefill_chunk)


class QwenTarget(LanguageTarget):
    """Pictures that its tower reads whole, positions in three coordinates.

    Args:
        num_token_ids: ids from here on have no token (151,665 of Qwen2.5-VL's 152,064 rows).
        resume: where text goes on after a clip.
        prefill_chunk: places of a prompt that are run at once; None: all.
    """

    decoder: QwenDecoder

    def __init__(
        self,
        model: nn.Module,
        *,
        num_token_ids: int,
        resume: Resume = "max_plus_one",
        prefill_chunk: int | None = None,
    ):
        recurs = recurrent_layers(cast(Any, model).config.get_text_config())
        decoder = (HybridDecoder if recurs else QwenDecoder)(model, num_token_ids=num_token_ids, resume=resume)
        super().__init__(decoder, prefill_chunk=prefill_chunk)

    def _run(self, prompts: PromptRows, row: PackedRow | None, taps: Taps) -> DecoderStates:
        # In one row with others a sample would begin with their recurrent states.
        return super()._run(prompts, None if isinstance(self.decoder, HybridDecoder) else row, taps)

    def view(self, request: Request) -> Request:
        """The request as the target reads it. Raises `UserError` where its pictures are cut for another family."""
        if any(picture.whole is None for picture in request.pictures) or (
            request.pixels is not None and not request.pictures
        ):
            raise UserError(
                "the target reads pictures whole, in patches, and these are cut into tiles",
                where=request.name,
                hint="use the processor of a Qwen-VL for this target's requests",
            )
        return request
