"""LLaVA-1.5, NeXT and OneVision as targets: transformers' weights and modules, our positions, masks and cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from pydantic import model_validator
from torch import nn

from ....core.batch import IMAGE, Request
from ....core.errors import UserError
from ...parts import TokenIds
from ...pictures import flat_view, pictures_of
from ..family import Family, Pictures, tower_type
from ..language import LanguageTarget
from ..section import SeeingSection
from .model import MODELS, LlavaDecoder, LlavaKind, LlavaTraining, llava_config, model_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class LlavaTarget(LanguageTarget):
    """Also serves text-only causal models of the Llama family: requests without pictures need no tower.

    Args:
        image_token_id: the placeholder, which is never emitted.
        reads_tiles: True asks for tiled pictures, False takes the first tile of each and no newline; None reads
            whatever a request holds.
        settings: as of every target.
    """

    decoder_class = LlavaDecoder

    def __init__(
        self, model: nn.Module, *, image_token_id: int | None, reads_tiles: bool | None = None, **settings: Any
    ):
        super().__init__(model, never=() if image_token_id is None else (image_token_id,), **settings)
        self.reads_tiles = reads_tiles

    def view(self, request: Request) -> Request:
        if any(picture.whole is not None for picture in request.pictures):
            raise UserError(
                "the target reads pictures in tiles, and these are cut for a Qwen-VL",
                where=request.name,
                hint="use the processor of a LLaVA for this target's requests",
            )
        if self.reads_tiles is False:
            return flat_view(request)
        if self.reads_tiles and any(p.modality == IMAGE and p.is_plain for p in pictures_of(request)):
            raise UserError(
                "the target reads pictures in tiles, and this one has a single tile",
                where=request.name,
                hint="set aspect: anyres (LLaVA-NeXT) or anyres_max_9 (LLaVA-OneVision) in the data section, or "
                "target.anyres: false to feed it one tile",
            )
        return request


# Engines cut the pictures of LLaVA-NeXT and OneVision into tiles by themselves, and hand no states to heads.
_ENGINES = {"llava": {"vllm": ("eagle", "eagle3", "dflash", "patched"), "sglang": ("eagle",)}}
# model_type -> record.
FAMILIES: dict[str, Family] = {
    name: Family(
        name, model_class, LlavaTraining, LlavaTarget, Pictures(), one_tile=name == "llava", shares_pictures=True,
        engines=_ENGINES.get(name, {}), is_compared=True,
    )
    for name in MODELS
}  # fmt: skip


class LlavaTargetConfig(SeeingSection):
    """A LLaVA target: published weights, or a tiny one that a recipe spells out and trains itself."""

    families: ClassVar[Mapping[str, Family]] = FAMILIES

    # LLaVA-1.5, LLaVA-NeXT (1.6) or LLaVA-OneVision; the model_type of the weights' own config.
    kind: Literal["llava", "llava_next", "llava_onevision"]
    # Of an inline tower; null: the family's, -2, or -1 in OneVision (whose tower has lost its last layer).
    vision_feature_layer: int | None = None
    # Whether it reads pictures in tiles, as the data must then cut them (aspect). false: the first tile alone, without
    # a newline, which is what TABED's released code feeds LLaVA-NeXT; null: as the family was trained.
    anyres: bool | None = None

    @model_validator(mode="after")
    def _tiles(self) -> Self:
        if self.anyres and self.base_kind == "llava":
            raise ValueError("anyres is true, and LLaVA-1.5 reads one tile; use kind llava_next or llava_onevision")
        return self

    @property
    def reads_tiles(self) -> bool | None:
        return None if self.base_kind == "llava" else self.anyres is not False

    def joined(self, text: PreTrainedConfig, vision: PreTrainedConfig, ids: TokenIds) -> PreTrainedConfig:
        layer = self.vision_feature_layer
        if layer is None:
            layer = -1 if self.base_kind == "llava_onevision" else -2
        return llava_config(text, vision, ids, vision_feature_layer=layer, family=cast(LlavaKind, self.base_kind))

    def target(self, model: PreTrainedModel, *, num_token_ids: int, image_token_id: int | None) -> LanguageTarget:
        if tower_type(model.config) == "pixtral":
            raise UserError(
                "the weights are a Pixtral: a LLaVA whose tower reads pictures whole, and not in tiles",
                key="target.kind", hint="write kind: pixtral",
            )  # fmt: skip
        return LlavaTarget(
            model, num_token_ids=num_token_ids, image_token_id=image_token_id, reads_tiles=self.reads_tiles,
            prefill_chunk=self.prefill_chunk,
        )  # fmt: skip
