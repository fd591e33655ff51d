"""Gathers whole tensors of a model that is sharded over ranks (transformers' tensor parallel plan) on every rank.

Outputs of its modules are whole as they come. What is not: weights that are read outside their module, and attention
weights, of which each rank has its own heads. All ranks call these functions together.
Letters: R rows, H heads, K keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_cut(weight: Tensor) -> bool:
    """Whether ranks hold parts of it: torch's `DTensor`, a module that is imported where there are several ranks."""
    return hasattr(weight, "full_tensor")


def whole(weight: Any) -> Tensor:
    """The tensor itself, or all parts of one that is cut over ranks."""
    return weight.full_tensor() if is_cut(weight) else weight


def all_heads(weights: Tensor, num_heads: int) -> Tensor:
    """[R,h,K] of this rank's h heads -> [R,H,K] of all `num_heads`: ranks hold neighbouring heads, in their order."""
    count = num_heads // weights.shape[1]
    if count == 1:
        return weights
    parts = [torch.empty_like(weights) for _ in range(count)]
    torch.distributed.all_gather(parts, weights.contiguous())
    return torch.cat(parts, dim=1)
