"""Losses over a vocabulary whose gradients are known: they are made in place of the log-probabilities, so that a step
reads a vocabulary fewer times, and waits less for memory.

Letters: S positions, W drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Scores that TVD goes through at once: fresh memory costs a CPU more than what is written to it, and a GPU waits for
# many small calls.
AT_ONCE, AT_ONCE_ON_CPU = 1 << 23, 1 << 19


def soft_cross_entropy(target_probs: Tensor, draft_scores: Tensor, never: Tensor, least: float) -> Tensor:
    """`losses.soft_cross_entropy`; `least` stands for the logarithm of 0."""
    return _SoftCrossEntropy.apply(draft_scores, target_probs, never, least)


class _SoftCrossEntropy(torch.autograd.Function):
    """The gradient is q - p."""

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


def total_variation(target_scores: Tensor, draft_scores: Tensor) -> Tensor:
    """`losses.divergence("tvd", ...)` of scores [S,V], without a gradient for the target's."""
    return _TotalVariation.apply(draft_scores, target_scores)


class _TotalVariation(torch.autograd.Function):
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
