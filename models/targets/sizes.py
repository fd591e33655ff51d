"""Numbers of parameters, by part, without weights: the model is built on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..hub import is_tied
from ..parts import num_parameters
from .table import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

T = TypeVar("T")
_counts: dict[str, Any] = {}


def empty_model(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build a target or drafter of the language tracks on the meta device; `dtype` None: torch's default type."""
    with torch.device("meta"):
        model: Any = family_of(config).new(config)
    return model if dtype is None else model.to(dtype)


def once(text: str, count: Callable[[], T]) -> T:
    """`count()`, stored by a text that says all it depends on: a dry run asks often, and models take long to build."""
    if text not in _counts:
        _counts[text] = count()
    return _counts[text]


def config_text(config: PreTrainedConfig) -> str:
    """All values of a config."""
    return f"{type(config).__name__} {config.to_json_string(use_diff=False)}"


def parameter_counts(config: PreTrainedConfig) -> dict[str, int]:
    """Parameters by part; the LM head belongs to the language model."""

    def count() -> dict[str, int]:
        model = empty_model(config)
        if is_tied(config):
            model.tie_weights()
        parts = family_of(config).training.parts_of(model)
        return {str(name): num_parameters([module]) for name, module in parts.items()}

    return dict(once(f"parameters of {config_text(config)}", count))


def parameter_lines(config: PreTrainedConfig, *, vocabulary: bool = False) -> list[str]:
    """Lines of a dry run: a part's name in 16 places, its parameters in 16, and their sum, beside the `vocabulary`."""
    counts = parameter_counts(config)
    suffix = f"   vocabulary {config.get_text_config().vocab_size:,}" if vocabulary else ""
    lines = [f"  {name:<16} {count:>16,}" for name, count in {**counts, "total": sum(counts.values())}.items()]
    return [*lines[:-1], lines[-1] + suffix]
