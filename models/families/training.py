"""Which training forward a model has."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...core.batch import Batch
from ...core.errors import UserError
from ..packed_row import last_states
from ..parts import Part
from ..targets.gemma.model import GEMMA, GemmaTraining
from ..targets.internvl.model import INTERNVL, InternVLTraining
from ..targets.llava.model import FAMILIES, LlavaTraining
from ..targets.mistral.model import MistralTraining, reads_whole
from ..targets.qwen.model import QWEN_FAMILIES, QwenTraining
from ..training import ModelTraining


class CausalTraining(ModelTraining):
    """The training forward over a model of text alone: no pictures."""

    def by_part(self) -> dict[Part, nn.Module]:
        """The model's only part: the language model."""
        return {"language_model": self.model}

    def hidden_states(self, batch: Batch) -> Tensor:
        """Final states [B,T,D]."""
        assert batch.num_dummy_images or batch.pixels is None, "pictures for a model of text"
        model = self.model.model
        return last_states(model, batch, model.get_input_embeddings()(batch.ids), batch.positions[0])


def training_of(model: PreTrainedModel, trainable: Any, **settings: Any) -> ModelTraining:
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
    if family == GEMMA:
        return GemmaTraining(model, trainable, **settings)
    if reads_whole(model.config):
        return MistralTraining(model, trainable, **settings)
    if family == INTERNVL:
        return InternVLTraining(model, trainable, **settings)
    if family in FAMILIES:
        return LlavaTraining(model, trainable, **settings)
    if other := {*trainable} - {"language_model"}:
        raise UserError(f"trainable names {sorted(other)}, and {family} reads text alone", hint="[language_model]")
    return CausalTraining(model, trainable, **settings)
