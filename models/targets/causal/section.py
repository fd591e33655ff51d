"""A causal language model without a vision tower as a target: Llama and its likes (SAGE's rows of Llama-3).

Letters: B rows, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

from ....core.batch import Batch
from ....core.errors import UserError
from ...hub import read_config, sees_window
from ...inline import InlineModel
from ...packed_row import last_states
from ...parts import Part, TokenIds
from ...training import ModelTraining
from ..family import Family
from ..language import LanguageTarget
from ..section import TargetSection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class CausalTraining(ModelTraining):
    """The training forward over a model of text alone. Raises `UserError` where `trainable` names another part."""

    def __init__(self, model: PreTrainedModel, trainable: Sequence[Part], **settings: Any):
        if other := {*trainable} - {"language_model"}:
            raise UserError(
                f"trainable names {sorted(other)}, and {model.config.model_type} reads text alone",
                hint="[language_model]",
            )
        super().__init__(model, trainable, **settings)

    @staticmethod
    def parts_of(model: PreTrainedModel) -> dict[Part, nn.Module]:
        return {"language_model": model}

    def hidden_states(self, batch: Batch) -> Tensor:
        assert batch.num_dummy_images or batch.pixels is None, "pictures for a model of text"
        model = self.model.model
        return last_states(model, batch, model.get_input_embeddings()(batch.ids), batch.positions[0])


_HINT = "use a model of Llama's shape (llama, qwen2, qwen3, mistral without windows)"


class CausalTarget(LanguageTarget):
    """Text alone."""

    @classmethod
    @torch.inference_mode()
    def check_model(cls, model: Any) -> None:
        """That embedding, decoder and head in a row are the whole model: some scale or cap scores on the way."""
        name, hint = model.config.model_type, _HINT
        children = dict(model.named_children())
        core = children.get("model", nn.Identity())
        if "lm_head" not in children or not isinstance(dict(core.named_children()).get("layers"), nn.ModuleList):
            raise UserError(f"{name} has no decoder `model.layers` and head `lm_head`", key="target", hint=hint)
        check_windows(model.config)
        model.eval()
        embedding = model.get_input_embeddings()
        if embedding.weight.is_meta:  # a dry run's, whose scores have no values
            return
        ids = torch.arange(3, 7, device=embedding.weight.device)[None]
        whole = model(input_ids=ids, use_cache=False).logits.float()
        parts = model.lm_head(core(inputs_embeds=embedding(ids), use_cache=False)[0]).float().to(whole.device)
        if not torch.allclose(whole, parts, atol=1e-2 * float(whole.abs().max()), rtol=0):
            raise UserError(f"{name} does more than embed, decode and score", key="target", hint=hint)


def check_windows(text: PreTrainedConfig) -> None:
    """Raises `UserError` where some layers of a text config see a window: our masks show all of the past to each."""
    if sees_window(vars(text)):
        raise UserError(f"some layers of {text.model_type} see a window alone", key="target", hint=_HINT)


CAUSAL = Family("causal_lm", "AutoModelForCausalLM", CausalTraining, CausalTarget)
_STATES = ("eagle", "eagle3", "dflash")
# model_type -> record, of those that engines were read for; every other model of text is CAUSAL.
FAMILIES = dict.fromkeys(
    ("llama", "qwen2", "qwen3"), replace(CAUSAL, engines={"vllm": _STATES, "sglang": ("eagle", "eagle3")})
)


class CausalTargetConfig(TargetSection):
    """A text-only target: published weights, or a tiny one that a recipe spells out and trains itself."""

    families: ClassVar[Mapping[str, Family]] = FAMILIES

    kind: Literal["causal_lm"]
    reads_text_alone: ClassVar[bool] = True
    # Inline config of a target that a `train` stage with `model: target` makes from scratch.
    language_model: InlineModel | None = None

    @model_validator(mode="after")
    def _one_source(self) -> CausalTargetConfig:
        if (self.path is None) == (self.language_model is None):
            raise ValueError("give path or language_model")
        return self

    def inline_config(self, ids: TokenIds) -> PreTrainedConfig:
        assert self.language_model is not None
        text = read_config(self.language_model, key="target.language_model")
        ids.put_into(text)
        return text
