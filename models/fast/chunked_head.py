"""`losses.head_loss` a chunk of positions at a time: nothing of a chunk outlives it, so that what a step holds does not
grow with the vocabulary.

Letters: S positions, C positions of a chunk, D width, V vocabulary, M further sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def head_loss(
    hidden: Tensor, weight: Tensor | None, score: Callable[[Tensor, Tensor | None], Tensor],
    compare: Callable[[slice, Tensor], tuple[Tensor, Tensor]], chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Arguments and results are those of `losses.head_loss`."""
    return _Chunked.apply(hidden, weight, score, compare, chunk, torch.is_grad_enabled())


class _Chunked(torch.autograd.Function):
    """Takes each chunk's gradient in the forward, so that the head runs once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, score: Any, compare: Any, chunk: int, learns: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weight_learns = learns and ctx.needs_input_grad[1]
        if weight is not None:
            weight = weight.detach().requires_grad_(weight_learns)
        ctx.d_hidden = torch.zeros_like(hidden) if learns else None
        learning = [] if weight is None or not weight_learns else [weight]
        ctx.d_weight = torch.zeros_like(learning[0], dtype=wide) if learning else None
        loss, sums = hidden.new_zeros((), dtype=wide), torch.zeros((), device=hidden.device)
        # A rank without supervised tokens runs one empty chunk, so that its sums have the right shape.
        for start in range(0, max(1, len(hidden)), chunk):
            piece = slice(start, min(start + chunk, len(hidden)))
            with torch.set_grad_enabled(learns):
                states = hidden[piece].detach().requires_grad_(learns)
                value, counts = compare(piece, score(states, weight))
            loss, sums = loss + value.detach(), sums + counts
            if learns:
                d_states, *d_weight = torch.autograd.grad(value, [states, *learning])
                ctx.d_hidden[piece] = d_states
                for part in d_weight:
                    ctx.d_weight.add_(part)
        ctx.weight_dtype = None if weight is None else weight.dtype
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ctx.d_hidden, ctx.d_weight = ctx.d_hidden, ctx.d_weight, None, None
        d_weight = None if weight is None else weight.mul_(d_loss).to(ctx.weight_dtype)
        return (hidden.to(d_loss) * d_loss).to(hidden), d_weight, None, None, None, None
