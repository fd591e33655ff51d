"""What a training forward returns: sums, not means, so that the mean can be taken over the global batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class StepLoss:
    """Loss of one micro-batch on one rank.

    The loop divides the sum by the supervised tokens of the whole optimizer step: a mean for each micro-batch
    would give more weight to the tokens of small ones.
    """

    loss_sum: Tensor  # scalar float32, summed over supervised tokens
    num_tokens: Tensor  # scalar int64
    metrics: dict[str, Tensor] = field(default_factory=dict)  # further sums over supervised tokens
