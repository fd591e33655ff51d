"""Text-only causal language models (Llama and its likes) as something to train: the demo's tiny target of text."""

from __future__ import annotations

from torch import Tensor, nn

from ..core.nouns import Batch
from .llava import LlavaTraining, Part


class CausalTraining(LlavaTraining):
    """The training forward over a model of text alone: LLaVA's loss, no pictures."""

    def by_part(self) -> dict[Part, nn.Module]:
        """The model's only part: the language model."""
        return {"language_model": self.llava}

    def hidden_states(self, batch: Batch) -> Tensor:
        """Final states [B,T,D]."""
        assert batch.num_dummy_images or batch.pixels is None, "pictures for a model of text"
        return self.llava.model(
            input_ids=batch.ids,
            attention_mask=batch.attention_mask.long(),
            position_ids=batch.positions[0],
            use_cache=False,
        ).last_hidden_state
