"""Draft language models without eyes, at the target's vocabulary: what every engine takes as a plain draft model.

Of a draft LVLM this is its language model, which at a picture reads the placeholder's own row: no training ever showed
it that one, so it is exported for prompts of text alone.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...core.errors import UserError
from ..hub import config_value
from ..llava import grow_vocabulary, language_model_of
from .source import Target


def text_draft(model: PreTrainedModel, target: Target, *, where: str) -> PreTrainedModel:
    """A causal language model with as many rows as the target, in the precision of `model`.

    Args:
        model: a LLaVA of any family, or a causal language model.

    Raises:
        UserError: its vocabulary is larger than the target's, or its positions have three coordinates.
    """
    text, rows = model.config.get_text_config(), target.text.vocab_size
    if "mrope_section" in (config_value(text, "rope_parameters") or {}):
        raise UserError(
            f"a draft of {text.model_type} has positions of three coordinates (M-RoPE), which engines refuse in a "
            "draft model", where=where, cure="draft with a Llama, or with a head",
        )  # fmt: skip
    if text.vocab_size > rows:
        raise UserError(
            f"the draft has {text.vocab_size} rows of vocabulary, and the target {rows}: another tokenizer's",
            where=where, cure="name the target that it drafts for: --target",
        )  # fmt: skip
    config = type(text)(**{key: value for key, value in text.to_dict().items() if key not in _LEFT_OUT})
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draft.model.load_state_dict(language_model_of(model).state_dict())
    draft.lm_head.load_state_dict(model.lm_head.state_dict())
    if text.vocab_size < rows:
        grow_vocabulary(draft, rows, torch.Generator().manual_seed(0))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # A draft's own are not to be trusted: JackFram's are no ids of Llama's tokenizer.
        value = config_value(target.text, name)
        setattr(draft.config, name, value)
        setattr(draft.generation_config, name, value)
    draft.config.architectures = [type(draft).__name__]
    return draft.to(_dtype(model))


_LEFT_OUT = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path")


def _dtype(model: Any) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
