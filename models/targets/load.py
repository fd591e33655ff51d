"""Which target a recipe names, and how its weights come onto the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from transformers import LlavaForConditionalGeneration, PreTrainedConfig

from ...core.errors import UserError
from ...core.section import Section
from ..hub import read_config
from ..llava import TokenIds, assemble, llava_config
from .llava import LlavaTarget


class LlavaTargetConfig(Section):
    """A LLaVA-1.5 target: published weights, or a tiny one that a recipe spells out and trains itself."""

    kind: Literal["llava"]
    # Hub id or directory of the weights and the processor.
    path: str | None = None
    revision: str | None = None
    # Inline configs of a target that a `train` stage with `model: target` makes from nothing.
    language_model: dict[str, Any] | None = None
    vision_tower: dict[str, Any] | None = None
    vision_feature_layer: int = -2
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
        return self

    def provides(self) -> set[str]:
        """Things that need no stage: they come with the published weights."""
        return set() if self.path is None else {"target", "processor"}


def target_config(config: LlavaTargetConfig, ids: TokenIds | None, *, network: bool) -> PreTrainedConfig:
    """The model config of a target; `ids` come from the processor where the target is inline."""
    if config.path is not None:
        return read_config(config.path, key="target.path", revision=config.revision, network=network)
    assert config.language_model is not None and config.vision_tower is not None and ids is not None
    return llava_config(
        read_config(config.language_model, key="target.language_model"),
        read_config(config.vision_tower, key="target.vision_tower"),
        ids,
        vision_feature_layer=config.vision_feature_layer,
    )


def build_target(config: LlavaTargetConfig, ids: TokenIds) -> LlavaForConditionalGeneration:
    """A target to train: from its weights, or random from inline configs (the global generator decides)."""
    if config.path is not None:
        return load_llava(config.path, revision=config.revision, dtype=torch.float32, key="target.path")
    return assemble(target_config(config, ids, network=False))


def load_target(
    config: LlavaTargetConfig, source: str | Path, *, num_token_ids: int, image_token_id: int, device: torch.device
) -> LlavaTarget:
    """A frozen target from `source` (a trained stage's folder, or `config.path`)."""
    dtype = getattr(torch, config.dtype)
    model = load_llava(source, revision=config.revision, dtype=dtype, device_map=config.device_map, key="target.path")
    if config.device_map is None:
        model.to(device)
    return LlavaTarget(model, num_token_ids=config.num_token_ids or num_token_ids, image_token_id=image_token_id)


def load_llava(
    source: str | Path, *, revision: str | None, dtype: torch.dtype, key: str, device_map: str | None = None
) -> LlavaForConditionalGeneration:
    try:
        return LlavaForConditionalGeneration.from_pretrained(
            source, revision=revision, dtype=dtype, device_map=device_map, weights_only=True
        )
    except (OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{key}: cannot load {str(source)!r}: {first}", cure="check the name and the network"
        ) from error
