"""LLaVA-1.5, NeXT and OneVision as targets: transformers' weights and modules, our positions, masks and cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from pydantic import model_validator
from torch import nn

from ....core.batch import IMAGE, Request
from ....core.errors import UserError
from ....core.fields import Place
from ...hub import config_value, read_config
from ...inline import InlineModel
from ...parts import TokenIds
from ...pictures import flat_view, pictures_of
from ..family import Family, Pictures, tower_type
from ..language import LanguageTarget
from ..section import SeeingSection
from .model import (
    MODELS,
    LlavaDecoder,
    LlavaKind,
    LlavaTraining,
    assemble,
    llava_config,
    load_halves,
    model_class,
)

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
    # Inline configs, or a pretrained language model and a tower by their folders: a `train` stage with `model: target`
    # begins with these weights and a random projector. The tokenizer gets <image> and a pad token, where it has none.
    language_model: Place | InlineModel | None = None  # type: ignore[assignment]
    vision_tower: Place | InlineModel | None = None  # type: ignore[assignment]
    # Of a tower of its own; null: the family's, -2, or -1 in OneVision (whose tower has lost its last layer) and of a
    # tower that keeps its last state alone.
    vision_feature_layer: int | None = None
    # Whether it reads pictures in tiles, as the data must then cut them (aspect). false: the first tile alone, without
    # a newline, which is what TABED's released code feeds LLaVA-NeXT; null: as the family was trained.
    anyres: bool | None = None

    @model_validator(mode="after")
    def _tiles(self) -> Self:
        if self.anyres and self.base_kind == "llava":
            raise ValueError("anyres is true, and LLaVA-1.5 reads one tile; use kind llava_next or llava_onevision")
        return self

    @model_validator(mode="after")
    def _alike(self) -> Self:
        if isinstance(self.language_model, str) != isinstance(self.vision_tower, str):
            raise ValueError("language_model and vision_tower are both folders, or both inline configs")
        return self

    @property
    def halves(self) -> tuple[str, str] | None:
        if isinstance(self.language_model, str) and isinstance(self.vision_tower, str):
            return self.language_model, self.vision_tower
        return None

    def provides(self) -> set[str]:
        return super().provides() | (set() if self.halves is None else {"processor"})

    def inline_config(self, ids: TokenIds) -> PreTrainedConfig:
        if self.halves is None:
            return super().inline_config(ids)
        text, vision = (
            read_config(place, key=f"target.{key}", network=False)
            for place, key in zip(self.halves, ("language_model", "vision_tower"), strict=True)
        )
        vision = config_value(vision, "vision_config", vision)  # CLIP's holds a text half, too
        for key, config, name in ("language_model", text, "vocab_size"), ("vision_tower", vision, "patch_size"):
            if config_value(config, name) is None:
                problem = f"target.{key}: this is a {config.model_type}, whose config has no {name}"
                raise UserError(problem, key=f"target.{key}", where=str(dict(self)[key]), hint="give another folder")
        return self.joined(text, vision, replace(ids, vocab_size=max(ids.vocab_size, text.vocab_size)))

    def new(self, config: PreTrainedConfig) -> PreTrainedModel:
        if self.halves is None:
            return super().new(config)
        language_model, tower = load_halves(config, *self.halves, section="target")
        return assemble(config, language_model=language_model, vision_tower=tower)

    @property
    def reads_tiles(self) -> bool | None:
        return None if self.base_kind == "llava" else self.anyres is not False

    def joined(self, text: PreTrainedConfig, vision: PreTrainedConfig, ids: TokenIds) -> PreTrainedConfig:
        layer = self.vision_feature_layer
        if layer is None and self.base_kind == "llava_onevision":
            layer = -1
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
