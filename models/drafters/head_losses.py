"""The terms of a head's loss, and the target's LM head under them: a few slots at a time, at trained slots alone.

Letters: S trained slots, W passes, C slots of a piece, D width, V vocabulary (the draft's own, in EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...core.section import Section
from ..losses import Divergence, divergence_of_logs, list_mle, log_probs


class HeadObjective(Section):
    """Weights of the terms at each trained slot; a term of weight 0 is not computed."""

    # Of a train stage's `objective`: what is trained with the target's hidden states.
    kind: Literal["head"] = Field("head", exclude=True)

    # SmoothL1 between the predicted and the true state, mean over the width.
    feature: float = Field(0.0, ge=0)
    # Divergence between the two distributions that the LM head makes of them; lk_alpha and lk_hybrid are the LK losses.
    token: float = Field(0.0, ge=0)
    token_divergence: Divergence = "soft_ce"
    # Sum of |Q - P| over the vocabulary, at most 2.
    l1: float = Field(0.0, ge=0)
    # ListMLE over the target's likeliest tokens.
    listmle: float = Field(0.0, ge=0)
    # How many of them.
    top: int = Field(10, ge=1)
    # Weight of pass s is decay^s, as in EAGLE-3 (0.8); null: the mean over passes.
    decay: float | None = Field(None, gt=0, le=1)
    # Passes after the first in this stage; null: the head's mtp_steps. 0 for a stage of plain text.
    mtp_steps: int | None = Field(None, ge=0)
    # Width of the uniform noise on true states at 512 places; shorter samples get more of it (EAGLE: 0.2).
    noise: float = Field(0.2, ge=0)
    # Slots whose vocabulary is projected at once: about 40 bytes for each slot, pass and id.
    chunk: int = Field(128, ge=1)

    @model_validator(mode="after")
    def _some_term(self) -> HeadObjective:
        if not any((self.feature, self.token, self.l1, self.listmle)):
            raise ValueError("no term has a weight; give feature, token, l1 or listmle")
        return self


def pass_weights(objective: HeadObjective, count: int) -> list[float]:
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
        self, objective: HeadObjective, goal: Tensor, weights: list[float], scores: Callable[[Tensor], Tensor],
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
