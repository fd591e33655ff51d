"""Losses over a vocabulary whose gradients are made in the forward: in place of the log-probabilities, so that a step
reads a vocabulary fewer times; and an LM head a chunk of positions at a time, of which nothing outlives its chunk, so
that what a step holds does not grow with the vocabulary.

Letters: S positions, C positions of a chunk, W drafts, D width, V vocabulary, M further sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Scores that TVD goes through at once: fresh memory costs a CPU more than what is written to it, and a GPU waits for
# many small calls.
AT_ONCE, AT_ONCE_ON_CPU = 1 << 23, 1 << 19


class SoftCrossEntropy(torch.autograd.Function):
    """`losses.soft_cross_entropy`; `least` stands for the logarithm of 0. The gradient is q - p."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, p: Tensor, never: Tensor, least: float) -> Tensor:
        wide = scores if scores.dtype == torch.float64 else scores.float()
        log_q = torch.log_softmax(wide.masked_fill(never.unsqueeze(1), -torch.inf), dim=-1).clamp_(min=least)
        ctx.log_q, ctx.p = log_q, p
        return -torch.matmul(log_q, p.unsqueeze(-1)).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        q, ctx.log_q = ctx.log_q.exp_(), None
        return q.sub_(ctx.p.unsqueeze(1)).mul_(gradient.unsqueeze(-1)), None, None, None


class TotalVariation(torch.autograd.Function):
    """`losses.divergence("tvd", ...)` of scores [S,V], without a gradient for the target's."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target_scores: Tensor) -> Tensor:
        ctx.dtype = scores.dtype
        ctx.gradient = torch.empty_like(scores, dtype=torch.float64 if scores.dtype == torch.float64 else torch.float32)
        values = []
        for target, draft, gradient in _rows(target_scores, scores, ctx.gradient):
            p, q = (one.to(gradient).softmax(-1) for one in (target, draft))
            apart = p.sub_(q).neg_()
            values.append(0.5 * apart.abs().sum(-1))
            side = apart.sign_()
            gradient.copy_(side.sub_((q * side).sum(-1, keepdim=True)).mul_(q).mul_(0.5))
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        known, ctx.gradient = ctx.gradient, None
        return known.mul_(gradient.unsqueeze(-1)).to(ctx.dtype), None


def _rows(scores: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A few rows at a time of scores [S,V], and the same ones of `others` [S,V]."""
    most = AT_ONCE_ON_CPU if scores.device.type == "cpu" else AT_ONCE
    rows = max(1, most // scores.shape[-1])
    return zip(*(one.split(rows) for one in (scores, *others)), strict=True)


def head_loss(
    hidden: Tensor, weight: Tensor | None, score: Callable[[Tensor, Tensor | None], Tensor],
    compare: Callable[[slice, Tensor], tuple[Tensor, Tensor]], pieces: Iterable[slice],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Arguments and results are those of `losses.head_loss`; `pieces` are computed one after another. A rank without
    supervised tokens has one, which is empty, so that its sums have the right shape.
    """
    return _Chunked.apply(hidden, weight, score, compare, pieces, torch.is_grad_enabled())


class _Chunked(torch.autograd.Function):
    """Takes each chunk's gradient in the forward, so that the head runs once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, score: Any, compare: Any, pieces: Any, learns: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weight_learns = learns and ctx.needs_input_grad[1]
        if weight is not None:
            weight = weight.detach().requires_grad_(weight_learns)
        ctx.d_hidden = torch.zeros_like(hidden) if learns else None
        learning = [] if weight is None or not weight_learns else [weight]
        ctx.d_weight = torch.zeros_like(learning[0], dtype=wide) if learning else None
        loss, sums = hidden.new_zeros((), dtype=wide), torch.zeros((), device=hidden.device)
        for piece in pieces:
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
