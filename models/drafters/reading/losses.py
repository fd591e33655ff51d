"""The terms of a head's loss, and the target's LM head under them: a few slots at a time, at trained slots alone.

Letters: S trained slots, W passes, C slots of a piece, D width, V vocabulary (the draft's own, in EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...distillation import Compare
from ...losses import divergence_of_logs, list_mle, log_probs
from .config import ReadingObjective


def pass_weights(objective: ReadingObjective, count: int) -> list[float]:
    if objective.decay is None:
        return [1 / count] * count
    return [objective.decay**step for step in range(count)]


class TokenTerms:
    """What is compared at each slot, between the target's scores and those of every pass.

    Args:
        goal: [S,D] true states.
        scores: the target's LM head.
        ids: [V] of the draft's vocabulary; None: the target's. The target's distribution is then the one over these
            ids, and slots whose likeliest token lies outside count nothing (EAGLE-3).
    """

    metrics = ("top1", "top3", "alpha", "top1_last")

    def __init__(
        self, objective: ReadingObjective, goal: Tensor, weights: list[float], scores: Callable[[Tensor], Tensor],
        ids: Tensor | None = None,
    ):  # fmt: skip
        self.objective, self.goal, self.scores, self.ids = objective, goal, scores, ids
        self.weights = weights

    def __call__(self, piece: slice, ours: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted sum over a piece of the [S*W] outputs, with the scores [C*W,V], and the metrics' sums."""
        passes = len(self.weights)
        ours = ours.unflatten(0, (-1, passes))  # [C,W,V]
        with torch.no_grad():
            theirs = self.scores(self.goal[piece.start // passes : piece.stop // passes])
            theirs = theirs.to(ours.device, ours.dtype)
            best = theirs.argmax(-1)
            known = torch.ones_like(best, dtype=torch.bool)
            if self.ids is not None:
                theirs, whole = theirs[:, self.ids], best
                best = theirs.argmax(-1)
                known = self.ids[best] == whole
            log_p = log_probs(theirs)
        # Ids without a token have no score on either side.
        ours = ours.masked_fill(theirs.isneginf()[:, None], float("-inf"))
        log_q = log_probs(ours)
        loss = ours.new_zeros(())
        for number, weight in enumerate(self.weights):
            terms = self._terms(log_p, log_q[:, number], theirs, ours[:, number])
            loss = loss + weight * (terms * known).sum()
        with torch.no_grad():
            ranked = ours[:, 0].topk(min(3, ours.shape[-1]), dim=-1).indices == best[:, None]
            ranked &= known[:, None]
            alpha = (torch.minimum(log_p, log_q[:, 0]).exp().sum(-1) * known).sum()
            last = (ours[:, -1].argmax(-1) == best) & known
            sums = torch.stack([ranked[:, 0].sum(), ranked.any(-1).sum(), alpha, last.sum()]).float()
        return loss, sums

    def _terms(self, log_p: Tensor, log_q: Tensor, theirs: Tensor, ours: Tensor) -> Tensor:
        """[C], from log-probabilities and scores [C,V] of one pass."""
        objective = self.objective
        total = 0 * log_q.amax(-1)  # part of the graph where no term is
        if objective.token:
            total = total + objective.token * divergence_of_logs(objective.token_divergence, log_p, log_q)
        if objective.l1:
            total = total + 2 * objective.l1 * divergence_of_logs("tvd", log_p, log_q)
        if objective.listmle:
            total = total + objective.listmle * list_mle(theirs, ours, objective.top)
        return total


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
