"""Base of every config class: a recipe section that is checked before anything is allocated.

Each section lives beside the code that reads it. Unknown keys, wrong types and values out of range
are refused by pydantic; `recipes/load.py` turns its report into one readable message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import torch


class Section(BaseModel):
    """A frozen part of a recipe; unknown keys are errors, and types are not coerced from strings."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, validate_default=True, protected_namespaces=())


def torch_dtype(name: str) -> torch.dtype:
    """Converts the value of a `dtype` key to a torch dtype: bfloat16 -> `torch.bfloat16`."""
    import torch

    return getattr(torch, name)
