"""Divergences between a target's and a draft's distributions, per position, from raw scores.

p is the target's, q the draft's probability; alpha = sum of min(p, q) is what speculative sampling accepts.
Letters: S positions, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
    return divergence_of_logs(name, log_probs(target_scores), log_probs(draft_scores), beta=beta, eta=eta)


def log_probs(scores: Tensor) -> Tensor:
    """Log-probabilities [...,V] in at least float32; `NEVER` where a score is minus infinity."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    logs = torch.log_softmax(wide, dim=-1)
    return logs.masked_fill(logs.isneginf(), NEVER)


def divergence_of_logs(
    name: Divergence,
    log_p: Tensor,
    log_q: Tensor,
    *,
    beta: float = 0.5,
    eta: float = 3.0,
    alpha: Tensor | None = None,
) -> Tensor:
    """[S,N], [S,N] -> [S], over any N outcomes: a vocabulary, or a few tokens and the rest of it as one.

    Args:
        alpha: what lk_hybrid takes lambda from, without gradient; None: each position's own.
    """
    p = log_p.exp()
    if name == "soft_ce":
        return -(p * log_q).sum(-1)
    if name == "kl":
        return (p * (log_p - log_q)).sum(-1)
    q = log_q.exp()
    if name == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    if name == "jsd":
        log_m = torch.logaddexp(log_p + _log(beta), log_q + _log(1 - beta))
        return (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)
    if name == "tvd":
        return 0.5 * (p - q).abs().sum(-1)
    if name == "tvd_plus":
        return _tvd_plus(p, q, log_q)
    # In logarithms: where the two hardly meet alpha underflows, and there its gradient is needed most.
    log_alpha = torch.minimum(log_p, log_q).logsumexp(-1)
    if name == "lk_alpha":
        return -log_alpha
    own = log_alpha.exp()
    weight = torch.exp(-eta * (own if alpha is None else alpha).detach())
    return weight * (p * (log_p - log_q)).sum(-1) + (1 - weight) * (1 - own)


def list_mle(target_scores: Tensor, draft_scores: Tensor, top: int = 10) -> Tensor:
    """[S,V], [S,V] -> [S]: how unlikely the draft's scores make the order of the target's `top` likeliest tokens.

    Plackett-Luce over these tokens alone: -sum_i (s_i - log sum_{k>=i} exp s_k), s in the target's order (ViSpec).
    Tokens that must not come (minus infinity) take no part.
    """
    best = target_scores.topk(min(top, target_scores.shape[-1]), dim=-1)
    wide = draft_scores if draft_scores.dtype == torch.float64 else draft_scores.float()
    ours = wide.gather(-1, best.indices)
    never = best.values.isneginf() | ours.isneginf()
    ours = ours.masked_fill(never, NEVER)
    behind = ours.flip(-1).logcumsumexp(-1).flip(-1)
    return (behind - ours).masked_fill(never, 0).sum(-1)


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


def _log(share: float) -> float:
    return torch.tensor(share, dtype=torch.float64).log().item() if share > 0 else NEVER
