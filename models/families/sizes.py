"""How many parameters a model has, by part, without its weights: it is built on the meta device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..parts import is_tied
from ..targets.gemma.model import GEMMA, gemma_parts, new_gemma
from ..targets.internvl.model import INTERNVL, new_internvl
from ..targets.llava.model import FAMILIES, llava_parts, new_model
from ..targets.mistral.model import MISTRAL3, new_mistral
from ..targets.qwen.model import QWEN_FAMILIES, qwen_parts


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Of any target or drafter of the language tracks, on the meta device."""
    with torch.device("meta"):
        if config.model_type in FAMILIES:
            return new_model(config)
        if config.model_type in QWEN_FAMILIES:
            return QWEN_FAMILIES[config.model_type][1](config)
        if config.model_type == INTERNVL:
            return new_internvl(config)
        if config.model_type == MISTRAL3:
            return new_mistral(config)
        if config.model_type == GEMMA:
            return new_gemma(config)
        return AutoModelForCausalLM.from_config(config)


@dataclass(frozen=True)
class _Described:
    """A config that is equal to another one where all of its values are."""

    text: str
    config: PreTrainedConfig = field(compare=False)


def parameter_counts(config: PreTrainedConfig) -> dict[str, int]:
    """Parameters by part; the LM head belongs to the language model."""
    text = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    return dict(_counted(_Described(text, config)))


@functools.lru_cache(64)  # a dry run asks a score of times for two or three models, which take long to build
def _counted(described: _Described) -> dict[str, int]:
    config = described.config
    model = empty_model(config)
    if is_tied(config):
        model.tie_weights()
    if config.model_type in (*FAMILIES, INTERNVL, MISTRAL3):
        parts = llava_parts(model)
    elif config.model_type == GEMMA:
        parts = gemma_parts(model)
    else:
        parts = qwen_parts(model) if config.model_type in QWEN_FAMILIES else {"language_model": model}
    return {str(name): num_parameters([module]) for name, module in parts.items()}


def parameter_lines(config: PreTrainedConfig, *, vocabulary: bool = False) -> list[str]:
    """Lines of a dry run: a part's name in 16 places, its parameters in 16, and their sum.

    Args:
        vocabulary: whether its size stands beside the sum.
    """
    counts = parameter_counts(config)
    suffix = f"   vocabulary {config.get_text_config().vocab_size:,}" if vocabulary else ""
    lines = [f"  {name:<16} {count:>16,}" for name, count in {**counts, "total": sum(counts.values())}.items()]
    return [*lines[:-1], lines[-1] + suffix]


def num_parameters(modules: Sequence[nn.Module]) -> int:
    """Distinct parameters: a tied head counts once."""
    return sum(p.numel() for p in {id(p): p for m in modules for p in m.parameters()}.values())
