"""Divergences between a target's and a draft's distributions, per position, from raw scores.

p is the target's, q the draft's probability; alpha = sum of min(p, q) is what speculative sampling accepts.
Letters: S positions, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["soft_ce", "kl", "lk_alpha", "lk_hybrid"]


def divergence(name: Divergence, target_scores: Tensor, draft_scores: Tensor) -> Tensor:
    """[S,V], [S,V] -> [S] float32. Ids that must not come have minus infinity in both.

    - soft_ce: -sum p log q (EAGLE's classification term).
    - kl: sum p log(p/q), forward.
    - lk_alpha: -log alpha.
    - lk_hybrid: lambda KL + (1 - lambda) TV with lambda = exp(-3 alpha), alpha without gradient (LK losses,
      arXiv 2602.23881).
    """
    log_p = torch.log_softmax(target_scores.float(), dim=-1)
    log_q = torch.log_softmax(draft_scores.float(), dim=-1)
    p = log_p.exp()
    if name == "soft_ce":
        return -_expected(p, log_q)
    if name == "kl":
        return _expected(p, log_p - log_q)
    # In logarithms: where the two hardly meet alpha underflows, and there its gradient is needed most.
    log_alpha = torch.minimum(log_p, log_q).logsumexp(-1)
    if name == "lk_alpha":
        return -log_alpha
    alpha = log_alpha.exp()
    weight = torch.exp(-3.0 * alpha.detach())
    return weight * _expected(p, log_p - log_q) + (1 - weight) * (1 - alpha)


def _expected(p: Tensor, values: Tensor) -> Tensor:
    """sum of p x values, where a token without probability adds nothing (0 x -inf is not a number)."""
    return (p * values.masked_fill(p == 0, 0.0)).sum(-1)
