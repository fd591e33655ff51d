"""How many parameters a model has, by part, without its weights: it is built on the meta device."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..hub import is_tied
from ..parts import num_parameters
from .table import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def empty_model(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build a target or drafter of the language tracks on the meta device; `dtype` None: torch's default type."""
    with torch.device("meta"):
        model: Any = family_of(config).new(config)
    made: PreTrainedModel = model if dtype is None else model.to(dtype)
    return made


@dataclass(frozen=True)
class Described:
    """A config that is equal to another one where all of its values are: a dry run asks a score of times for two or
    three models, which take long to build.
    """

    text: str
    config: PreTrainedConfig = field(compare=False)
    settings: tuple[Any, ...] = field(compare=False)

    @classmethod
    def of(cls, config: PreTrainedConfig, *settings: object) -> Described:
        """The config with settings whose `repr` says all of them."""
        return cls(f"{type(config).__name__} {config.to_json_string(use_diff=False)} {settings!r}", config, settings)


def parameter_counts(config: PreTrainedConfig) -> dict[str, int]:
    """Parameters by part; the LM head belongs to the language model."""
    return dict(_counted(Described.of(config)))


@functools.lru_cache(64)
def _counted(described: Described) -> dict[str, int]:
    config = described.config
    model = empty_model(config)
    if is_tied(config):
        model.tie_weights()
    parts = family_of(config).training.parts_of(model)
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
