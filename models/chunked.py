"""An LM head with its loss on top, a few positions at a time: what a step holds does not grow with the vocabulary.

Each piece's gradient is taken in the forward, so that no scores outlive their piece, and the head is one module call
whatever the number of supervised positions: ranks make the same collectives under ZeRO-3.
Letters: S positions, C positions of a piece, D width, V vocabulary, M further sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# A piece of the positions and the scores [C,V] there -> a loss summed over them, and further sums [M].
Compare = Callable[[slice, Tensor], tuple[Tensor, Tensor]]


class ChunkedHead(nn.Module):
    """The draft's LM head with the loss on top, a chunk of positions at a time.

    It shares the head's parameter and reads it in one module call for all chunks: ZeRO-3 gathers the weight for that
    call, and ranks with different numbers of supervised tokens still make the same collectives.
    """

    def __init__(self, head: nn.Linear, chunk: int):
        super().__init__()
        assert head.bias is None, "LM heads of the Llama family have no bias"
        self.weight: nn.Parameter = head.weight
        self.chunk: int = chunk

    def forward(self, hidden: Tensor, compare: Compare) -> tuple[Tensor, Tensor]:
        """States [S,D] -> the loss summed over all positions, and the further sums."""
        return _Chunked.apply(hidden, self.weight, compare, self.chunk, torch.is_grad_enabled())


class _Chunked(torch.autograd.Function):
    """Takes each chunk's gradient in the forward: nothing of a chunk outlives it, and the head runs once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, compare: Compare, chunk: int, learns: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        ctx.d_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device) if learns else None
        learns_weight = learns and ctx.needs_input_grad[1]
        ctx.d_weight = torch.zeros(weight.shape, dtype=wide, device=hidden.device) if learns_weight else None
        ctx.dtypes = hidden.dtype, weight.dtype
        loss, sums = torch.zeros((), dtype=wide, device=hidden.device), torch.zeros((), device=hidden.device)
        # A rank without supervised tokens in this batch compares nothing, once: its sums have the right shape.
        for start in range(0, max(1, len(hidden)), chunk):
            piece = slice(start, start + chunk)
            scores = F.linear(hidden[piece], weight).to(wide).requires_grad_(learns)
            with torch.set_grad_enabled(learns):
                value, found = compare(piece, scores)
            loss, sums = loss + value.detach(), sums + found
            if learns:
                gradient = torch.autograd.grad(value, scores)[0].to(hidden.dtype)
                ctx.d_hidden[piece] = gradient @ weight
                if learns_weight:
                    ctx.d_weight += gradient.T @ hidden[piece]
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.d_hidden, ctx.d_weight
        ctx.d_hidden = ctx.d_weight = None
        hidden_type, weight_type = ctx.dtypes
        d_hidden = hidden.mul_(d_loss).to(hidden_type)
        return d_hidden, None if weight is None else weight.mul_(d_loss).to(weight_type), None, None, None


class FrozenHead(nn.Module):
    """The target's LM head as `ChunkedHead` is a draft's: gradients flow to the states alone.

    Args:
        scores: [...,D] -> [...,V] float32.
    """

    def __init__(self, scores: Callable[[Tensor], Tensor], chunk: int, dtype: torch.dtype):
        super().__init__()
        self.scores, self.chunk, self.dtype = scores, chunk, dtype

    def forward(self, hidden: Tensor, compare: Compare) -> tuple[Tensor, Tensor]:
        """States [S,D] -> the loss summed over them, and the further sums."""
        return _Frozen.apply(hidden, self.scores, compare, self.chunk, self.dtype, torch.is_grad_enabled())


class _Frozen(torch.autograd.Function):
    """Each piece's gradient is taken in the forward, so that no scores outlive their piece."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, scores: Callable[[Tensor], Tensor], compare: Compare, chunk: int,
        dtype: torch.dtype, learns: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        ctx.gradient = torch.zeros_like(hidden) if learns else None
        loss, sums = hidden.new_zeros((), dtype=wide), torch.zeros((), device=hidden.device)
        # Nothing to compare is compared once: the sums have the right shape.
        for start in range(0, max(1, len(hidden)), chunk):
            piece = slice(start, min(start + chunk, len(hidden)))
            with torch.set_grad_enabled(learns):
                states = hidden[piece].detach().requires_grad_(learns)
                value, found = compare(piece, scores(states.to(dtype)))
            loss, sums = loss + value.detach(), sums + found
            if learns:
                ctx.gradient[piece] = torch.autograd.grad(value, states)[0]
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient * d_loss.to(gradient), None, None, None, None, None
