"""Which target a recipe names, and how its weights come onto the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from transformers import PreTrainedConfig, PreTrainedModel

from ...core.errors import UserError, did_you_mean, first_line
from ...core.section import Section
from ..hub import read_config
from ..llava import FAMILIES, TokenIds, assemble, llava_config
from .llava import LlavaTarget


class LlavaTargetConfig(Section):
    """A LLaVA target: published weights, or a tiny one that a recipe spells out and trains itself."""

    # LLaVA-1.5, LLaVA-NeXT (1.6) or LLaVA-OneVision; the model_type of the weights' own config.
    kind: Literal["llava", "llava_next", "llava_onevision"]
    # Hub id or directory of the weights and the processor.
    path: str | None = None
    revision: str | None = None
    # Inline configs of a target that a `train` stage with `model: target` makes from nothing.
    language_model: dict[str, Any] | None = None
    vision_tower: dict[str, Any] | None = None
    # Of an inline tower; null: the family's, -2, or -1 in OneVision (whose tower has lost its last layer).
    vision_feature_layer: int | None = None
    # Whether it reads pictures in tiles, as the data must then cut them (aspect). false: the first tile alone, without
    # a newline, which is what TABED's released code feeds LLaVA-NeXT; null: as the family was trained.
    anyres: bool | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # accelerate's device map for targets larger than one GPU (auto, balanced, ...); null: this rank's device.
    device_map: str | None = None
    # Vocabulary ids that have a token; null: all of the tokenizer's.
    num_token_ids: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_source(self) -> LlavaTargetConfig:
        inline = self.language_model is not None and self.vision_tower is not None
        if (self.path is None) == (not inline):
            raise ValueError("give path, or both language_model and vision_tower")
        if self.anyres and self.kind == "llava":
            raise ValueError("anyres is true, and LLaVA-1.5 reads one tile; use kind llava_next or llava_onevision")
        return self

    @property
    def reads_tiles(self) -> bool | None:
        """None: the family has one tile and nothing to choose."""
        return None if self.kind == "llava" else self.anyres is not False

    def provides(self) -> set[str]:
        """Things that need no stage: they come with the published weights."""
        return set() if self.path is None else {"target", "processor"}


def target_config(config: LlavaTargetConfig, ids: TokenIds | None, *, network: bool) -> PreTrainedConfig:
    """The model config of a target; `ids` come from the processor where the target is inline."""
    if config.path is not None:
        return read_config(config.path, key="target.path", revision=config.revision, network=network)
    assert config.language_model is not None and config.vision_tower is not None and ids is not None
    vision = read_config(config.vision_tower, key="target.vision_tower")
    layer = config.vision_feature_layer
    if layer is None:
        layer = -1 if config.kind == "llava_onevision" else -2
    return llava_config(
        read_config(config.language_model, key="target.language_model"),
        vision,
        ids,
        vision_feature_layer=layer,
        family=config.kind,
    )


def build_target(config: LlavaTargetConfig, ids: TokenIds) -> PreTrainedModel:
    """A target to train: from its weights, or random from inline configs (the global generator decides)."""
    if config.path is not None:
        return load_llava(
            config.path, revision=config.revision, dtype=torch.float32, key="target.path", kind=config.kind
        )
    return assemble(target_config(config, ids, network=False))


def load_target(
    config: LlavaTargetConfig, source: str | Path, *, num_token_ids: int, image_token_id: int, device: torch.device
) -> LlavaTarget:
    """A frozen target from `source` (a trained stage's folder, or `config.path`)."""
    dtype = getattr(torch, config.dtype)
    model = load_llava(
        source,
        revision=config.revision,
        dtype=dtype,
        device_map=config.device_map,
        key="target.path",
        kind=config.kind,
    )
    if config.device_map is None:
        model.to(device)
    return LlavaTarget(
        model,
        num_token_ids=config.num_token_ids or num_token_ids,
        image_token_id=image_token_id,
        reads_tiles=config.reads_tiles,
    )


def load_llava(
    source: str | Path,
    *,
    revision: str | None,
    dtype: torch.dtype,
    key: str,
    device_map: str | None = None,
    kind: str | None = None,
) -> PreTrainedModel:
    """A LLaVA of the family that its own config names.

    Args:
        kind: the family that is expected; None: any.

    Raises:
        UserError: the weights cannot be read, or are of another family.
    """
    found = read_config(str(source), key=key, revision=revision).model_type
    if found not in FAMILIES or kind not in (None, found):
        raise UserError(
            f"{key}: {str(source)!r} is of model_type {found!r}, expected {kind or ' or '.join(FAMILIES)}",
            cure=f"write kind: {found}" if found in FAMILIES else did_you_mean(found, FAMILIES),
        )
    try:
        return FAMILIES[found][1].from_pretrained(
            source, revision=revision, dtype=dtype, device_map=device_map, weights_only=True
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"{key}: cannot load {str(source)!r}: {first_line(error)}", cure="check the name and the network"
        ) from error
