"""A confidence head for DFlash drafts, after DSpark's (arXiv 2607.05147): how likely each drafted token is accepted.

A linear layer reads the draft's own output at each mask and says how likely the target accepts what is drafted there,
given that it accepted all before. Training's label is that chance itself, alpha = sum of min(p, q). In decoding the
block ends before the first mask where the product of these chances falls below a threshold. The product is known before
any token is drawn, so that sampled proposals stay exact: a head that reads the token before a place reads the likeliest
path's (dspark.py).
Letters: S trained places, K masks, D width, V vocabulary, V' the draft's.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.section import Section
from .goal_scores import Goals


class DflashConfidence(Section):
    """Trains a confidence head beside the draft."""

    # Weight of its binary cross-entropy in the loss, relative to the draft's own (DSpark: 1).
    weight: float = Field(1.0, gt=0)
    # Whether its gradient ends at the head, so that the draft learns what it would learn without one. False lets the
    # draft's layers learn from it as well.
    detached: bool = True


class ConfidenceHead(nn.Module):
    """Scores of acceptance; parameter names are the published ones."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, outputs: Tensor) -> Tensor:
        """The draft's outputs [...,D] -> logits [...] float32."""
        return self.proj(outputs)[..., 0].float()


@torch.no_grad()
def acceptance(goals: Goals, draft_scores: Tensor) -> Tensor:
    """Return the chance [S] float32 that a token drawn from the draft's scores [S,V'] is accepted at temperature 1.

    Args:
        goals: the target's, of the ids that the draft scores; it never proposes another one.
    """
    p = goals.scores.float()
    p = p.softmax(-1) if goals.log_sum is None else (p - goals.log_sum[:, None]).exp_()
    return torch.minimum(p, draft_scores.float().softmax(-1)).sum(-1)


def confidence_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[S] each -> the weighted sum of binary cross-entropies, and that of |chance - label|."""
    loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    with torch.no_grad():
        error = (logits.sigmoid() - labels).abs()
    return (loss * weights).sum(), (error * weights).sum()


def kept_levels(logits: Tensor, threshold: float) -> int:
    """How many of a block's tokens are verified: those before which, and with which, the chance that all are accepted
    is at least `threshold`; one at least. The host waits once.

    Args:
        logits: [K] of the block's masks.
    """
    survives = logits.double().sigmoid().cumprod(0)
    return max(1, int((survives >= threshold).sum()))
