"""Rows: several views of one request in one batch, and the rule that makes one distribution of them.

Guidance pairs (conditional, unconditional) and ensemble members are both rows with a reduction, and
they nest. Letters: R rows, F nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]  # [R,F,V] -> [F,V]


@dataclass(frozen=True)
class Rows:
    """Left-padded rows with their own positions.

    A row of `lengths[r]` tokens fills the last places of the shared prefix; its positions count from 0,
    and the padding before it is never seen.
    """

    lengths: tuple[int, ...]
    reduce: Reduce

    @property
    def prefix(self) -> int:
        return max(self.lengths)

    def prefix_positions(self) -> Tensor:
        """[R,prefix] int64; padding gets 0."""
        places = torch.arange(self.prefix)
        return torch.stack([(places - (self.prefix - n)).clamp(min=0) for n in self.lengths])

    def prefix_mask(self) -> Tensor:
        """[R,prefix] bool: the places that hold a token."""
        places = torch.arange(self.prefix)
        return torch.stack([places >= self.prefix - n for n in self.lengths])

    def positions(self, offset: Tensor) -> Tensor:
        """[R,F] positions of nodes that stand `offset` [F] places behind the prefix."""
        return torch.tensor(self.lengths, device=offset.device)[:, None] + offset[None]


def first_row(scores: Tensor) -> Tensor:
    """The reduction of a single row."""
    return scores[0]


def guide(scale: float, inner: Reduce | None = None) -> Reduce:
    """Classifier-free guidance over halves [cond rows; uncond rows]: uncond + s (cond - uncond), then `inner`."""

    def reduce(scores: Tensor) -> Tensor:
        cond, uncond = scores.chunk(2)
        guided = uncond + scale * (cond - uncond)
        # Ids that must not come have minus infinity on both sides, and their difference is not a number.
        guided = guided.masked_fill(cond.isneginf() | uncond.isneginf(), float("-inf"))
        return (inner or first_row)(guided)

    return reduce


def mix(weights: Tensor, temperature: float) -> Reduce:
    """An ensemble: sum of weights [R] times softmax(scores / T), as log-probabilities so that reductions nest."""

    def reduce(scores: Tensor) -> Tensor:
        probs = torch.softmax(scores.float() / (temperature or 1.0), dim=-1)
        return torch.einsum("r,rfv->fv", weights.to(probs), probs).log()

    return reduce


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance of an image generator, the same for target and drafter.

    With `interval` >= 0 only the first tokens are guided: token t uses the conditional scores alone as soon as
    t - 1 > interval (LlamaGen's `cfg_interval`, whose loop starts at the second image token). -1 guides always.
    """

    scale: float = 1.0
    interval: int = -1

    @property
    def num_rows(self) -> int:
        """LlamaGen runs one row where guidance would change nothing."""
        return 2 if self.scale > 1.0 else 1

    def __call__(self, scores: Tensor, steps: Sequence[int]) -> Tensor:
        """[R,F,V] -> [F,V]; node f scores image token number `steps[f]` (from 0)."""
        if scores.shape[0] == 1:
            return scores[0]
        guided = guide(self.scale)(scores)
        if self.interval < 0:
            return guided
        alone = torch.tensor([step - 1 > self.interval for step in steps], device=scores.device)
        return torch.where(alone[:, None], scores[0], guided)
