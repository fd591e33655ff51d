"""The training forward over a model of text alone. Letters: B rows, T tokens, D width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ....core.batch import Batch
from ....core.errors import UserError
from ...packed_row import last_states
from ...parts import Part
from ...training import ModelTraining

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CausalTraining(ModelTraining):
    """The training forward over a model of text alone: no pictures.

    Raises:
        UserError: `trainable` names a part that it has not.
    """

    def __init__(self, model: PreTrainedModel, trainable: Sequence[Part], **settings: Any):
        if other := {*trainable} - {"language_model"}:
            raise UserError(
                f"trainable names {sorted(other)}, and {model.config.model_type} reads text alone",
                hint="[language_model]",
            )
        super().__init__(model, trainable, **settings)

    @staticmethod
    def parts_of(model: PreTrainedModel) -> dict[Part, nn.Module]:
        """The model's only part: the language model."""
        return {"language_model": model}

    def hidden_states(self, batch: Batch) -> Tensor:
        """Final states [B,T,D]."""
        assert batch.num_dummy_images or batch.pixels is None, "pictures for a model of text"
        model = self.model.model
        return last_states(model, batch, model.get_input_embeddings()(batch.ids), batch.positions[0])
