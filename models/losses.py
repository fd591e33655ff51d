"""Divergences between a target's and a draft's distributions, per position, and LM heads with a loss on top.

p is the target's, q the draft's probability; alpha = sum of min(p, q) is what speculative sampling accepts.
`ChunkedHead` and `FrozenHead` are one module call for any number of supervised positions, so that ranks make the same
collectives under ZeRO-3.
Letters: S positions, C positions of a chunk, D width, V vocabulary, M further sums.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import fast
from .fast import in_place

Divergence = Literal["soft_ce", "kl", "reverse_kl", "jsd", "tvd", "tvd_plus", "lk_alpha", "lk_hybrid"]

# Stands for the logarithm of 0 where differences of logarithms are taken: minus infinity would make them no number.
NEVER = -1e30


def divergence(
    name: Divergence, target_scores: Tensor, draft_scores: Tensor, *, beta: float = 0.5, eta: float = 3.0
) -> Tensor:
    """[S,V], [S,V] -> [S] float32 (float64 from float64). Ids that must not come have minus infinity in both.

    - soft_ce: -sum p log q (EAGLE's classification term).
    - kl: sum p log(p/q), forward. reverse_kl: sum q log(q/p).
    - jsd: beta KL(p|m) + (1 - beta) KL(q|m), m = beta p + (1 - beta) q.
    - tvd: half the sum of |p - q|, which is 1 - alpha.
    - tvd_plus: TVD++ (arXiv 2403.00858), see `_tvd_plus`.
    - lk_alpha: -log alpha. lk_hybrid: lambda KL + (1 - lambda) TV with lambda = exp(-eta alpha), alpha without
      gradient (LK losses, arXiv 2602.23881).
    """
    if fast.enabled() and name == "tvd" and not target_scores.requires_grad:
        return in_place.TotalVariation.apply(draft_scores, target_scores)
    return divergence_of_logs(name, log_probs(target_scores), log_probs(draft_scores), beta=beta, eta=eta)


def log_probs(scores: Tensor) -> Tensor:
    """Log-probabilities [...,V] in at least float32; `NEVER` where a score is minus infinity."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return torch.log_softmax(wide, dim=-1).clamp(min=NEVER)


def soft_cross_entropy(target_probs: Tensor, draft_scores: Tensor, never: Tensor) -> Tensor:
    """-sum p log q [S,W] of W drafts' scores [S,W,V] beside one target's p [S,V], which is 0 at `never` [S,V] bool."""
    if fast.enabled():
        return in_place.SoftCrossEntropy.apply(draft_scores, target_probs, never, NEVER)
    log_q = log_probs(draft_scores.masked_fill(never[:, None], -torch.inf))
    return -(target_probs[:, None] * log_q).sum(-1)


def divergence_of_logs(
    name: Divergence, log_p: Tensor, log_q: Tensor, *, beta: float = 0.5, eta: float = 3.0
) -> Tensor:
    """[S,N], [S,N] -> [S], over any N outcomes: a vocabulary, or a few tokens and the rest of it as one."""
    p = log_p.exp()
    if name == "soft_ce":
        return -(p * log_q).sum(-1)
    if name == "kl":
        return (p * (log_p - log_q)).sum(-1)
    q = log_q.exp()
    if name == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    if name == "jsd":
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
        return (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)
    if name == "tvd":
        return 0.5 * (p - q).abs().sum(-1)
    if name == "tvd_plus":
        return _tvd_plus(p, q, log_q)
    # In logarithms: where the two hardly meet alpha underflows, and there its gradient is needed most.
    log_alpha = torch.minimum(log_p, log_q).logsumexp(-1)
    if name == "lk_alpha":
        return -log_alpha
    alpha = log_alpha.exp()
    weight = torch.exp(-eta * alpha.detach())
    return weight * (p * (log_p - log_q)).sum(-1) + (1 - weight) * (1 - alpha)


def list_mle(target_scores: Tensor, draft_scores: Tensor, top: int = 10) -> Tensor:
    """[S,V], [S,V] -> [S]: how unlikely the draft's scores make the order of the target's `top` likeliest tokens, by
    Plackett-Luce over these alone: -sum_i (s_i - log sum_{k>=i} exp s_k), s in the target's order (ViSpec). Tokens that
    must not come (minus infinity) take no part.
    """
    best = target_scores.topk(min(top, target_scores.shape[-1]), dim=-1)
    wide = draft_scores if draft_scores.dtype == torch.float64 else draft_scores.float()
    ours = wide.gather(-1, best.indices)
    never = best.values.isneginf() | ours.isneginf()
    ours = ours.masked_fill(never, NEVER)
    log_rest = ours.flip(-1).logcumsumexp(-1).flip(-1)
    return (log_rest - ours).masked_fill(never, 0).sum(-1)


def _tvd_plus(p: Tensor, q: Tensor, log_q: Tensor) -> Tensor:
    """TVD as a policy gradient with normalised rewards: its value is TVD's, its gradient that of TVD over sigma.

    grad TVD = -E_q[r(x) grad log q(x)] with r(x) = 1 where q(x) < p(x). TVD++ takes (r - mean) / sigma for r. Here the
    expectation is the exact sum over the vocabulary, with mean and sigma of r under q at each position: no chunk of
    positions depends on another, and where the two hardly meet the gradient shrinks with the root of alpha only.
    """
    with torch.no_grad():
        reward = (q < p).to(q)
        mean = (q * reward).sum(-1, keepdim=True)
        sigma = (mean * (1 - mean)).sqrt().clamp(min=1e-6)
        weight = q * (reward - mean) / sigma
        value = 0.5 * (p - q).abs().sum(-1)
    surrogate = -(weight * log_q).sum(-1)
    return value + surrogate - surrogate.detach()


# A piece of the positions and the scores [C,V] there -> a loss summed over them, and further sums [M].
Compare = Callable[[slice, Tensor], tuple[Tensor, Tensor]]


def pieces(count: int, chunk: int, ends: Sequence[int] | None = None) -> Iterator[slice]:
    """Slices of `count` positions, at least one, of at most `chunk` each. With `ends`, ascending up to `count`, they
    stop there alone: what lies between two ends is compared at once, and may be longer than `chunk`.
    """
    start, is_first = 0, True
    while start < count or is_first:
        stop = min(start + chunk, count)
        if ends and stop < count:
            before = bisect_right(ends, stop)
            stop = ends[before - 1] if before and ends[before - 1] > start else ends[before]
        yield slice(start, stop)
        start, is_first = stop, False


def head_loss(
    hidden: Tensor, weight: Tensor | None, score: Callable[[Tensor, Tensor | None], Tensor], compare: Compare,
    chunk: int, ends: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """States [S,D] under an LM head -> the loss summed over them, and the further sums [M]. `score` makes [C,V] in at
    least float32 of states [C,D] and the weight, which may learn (None: the states alone have a gradient); the fast
    form scores `chunk` positions at once, and ends its `pieces` at `ends`.
    """
    if fast.enabled():
        return in_place.head_loss(hidden, weight, score, compare, pieces(len(hidden), chunk, ends))
    loss, sums = compare(slice(0, len(hidden)), score(hidden, weight))
    return loss, sums.detach()


class ChunkedHead(nn.Module):
    """The draft's LM head with the loss on top, a chunk of positions at a time. It shares the head's parameter and
    reads it in one module call for all chunks: ZeRO-3 gathers the weight for that call, and ranks with different
    numbers of supervised tokens still make the same collectives. `added` [V,N] weighs N numbers behind each state, a
    further part of the scores.
    """

    def __init__(self, head: nn.Linear, chunk: int, added: nn.Parameter | None = None):
        super().__init__()
        assert head.bias is None, "LM heads of the Llama family have no bias"
        self.weight: nn.Parameter = head.weight
        self.added: nn.Parameter | None = added
        self.chunk: int = chunk

    def forward(self, hidden: Tensor, compare: Compare, ends: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """States [S,D+N] -> the loss summed over all positions, and the further sums; `ends` as of `pieces`."""
        weight = self.weight if self.added is None else torch.cat([self.weight, self.added], dim=1)

        def score(states: Tensor, weight: Tensor | None) -> Tensor:
            assert weight is not None
            scores = F.linear(states, weight)
            return scores.to(torch.promote_types(scores.dtype, torch.float32))

        return head_loss(hidden, weight, score, compare, self.chunk, ends)


class FrozenHead(nn.Module):
    """The target's LM head `scores` [...,D] -> [...,V] float32 as `ChunkedHead` is a draft's: gradients flow to the
    states, and to `added`.
    """

    def __init__(
        self, scores: Callable[[Tensor], Tensor], chunk: int, dtype: torch.dtype, added: nn.Parameter | None = None
    ):
        super().__init__()
        self.scores, self.chunk, self.dtype, self.added = scores, chunk, dtype, added

    def forward(self, hidden: Tensor, compare: Compare, ends: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """States [S,D+N] -> the loss summed over them, and the further sums; `ends` as of `pieces`."""

        def score(states: Tensor, added: Tensor | None) -> Tensor:
            if added is None:
                return self.scores(states.to(self.dtype))
            width = states.shape[1] - added.shape[1]
            scores = self.scores(states[:, :width].to(self.dtype))
            return scores + F.linear(states[:, width:], added).to(scores)

        return head_loss(hidden, self.added, score, compare, self.chunk, ends)
