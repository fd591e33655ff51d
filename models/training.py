"""Which training forward a model has."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..core.errors import UserError
from .causal import CausalTraining
from .llava import FAMILIES, LlavaTraining
from .qwen import QWEN_FAMILIES, QwenTraining


def training_of(model: PreTrainedModel, trainable: Any, **settings: Any) -> LlavaTraining:
    """The training module of the model's family.

    Args:
        settings: as `LlavaTraining` takes them; `resume` is Qwen-VL's alone.

    Raises:
        UserError: `trainable` names a part that a model of text has not.
    """
    family = model.config.model_type
    if family in QWEN_FAMILIES:
        return QwenTraining(model, trainable, **settings)
    settings.pop("resume", None)
    if family in FAMILIES:
        return LlavaTraining(model, trainable, **settings)
    if other := {*trainable} - {"language_model"}:
        raise UserError(f"trainable names {sorted(other)}, and {family} reads text alone", cure="[language_model]")
    return CausalTraining(model, trainable, **settings)
