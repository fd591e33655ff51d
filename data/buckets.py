"""Training orders that keep padding small: batches of like lengths, still in a random order.

Both are pure functions of (seed, epoch); `epoch_order` (data/order.py) has the order of LLaVA's own recipes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Order(Protocol):
    """Which samples an epoch has, in which order."""

    def __len__(self) -> int:
        """Rows of an epoch."""
        ...

    def __call__(self, epoch: int) -> np.ndarray:
        """[rows] int64 indices of samples."""
        ...


@dataclass(frozen=True)
class BucketedOrder:
    """Every sample once: shuffled, sorted by length within windows of batches, and the batches shuffled.

    Args:
        lengths: [n], of any sign.
        window: batches that are sorted together; 1 leaves the shuffled order alone.
    """

    lengths: np.ndarray
    seed: int
    batch_size: int
    window: int = 50

    def __len__(self) -> int:
        return len(self.lengths)

    def __call__(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch])
        return in_buckets(rng.permutation(len(self.lengths)), self.lengths, self.batch_size, self.window, rng)


@dataclass(frozen=True)
class RisingVisualOrder:
    """MSD's schedule: text alone for `text_epochs`, then a share of samples with pictures that rises to all of them.

    An epoch has as many rows as the larger of the two kinds has samples; a kind that is drawn more often than it has
    samples begins anew. Epochs are counted from 0: epoch e draws a visual sample with probability
    (e + 1 - text_epochs) / (epochs - text_epochs), 0.05 to 1 in MSD's second twenty of forty.
    """

    lengths: np.ndarray  # [n], negative without pictures
    seed: int
    batch_size: int
    text_epochs: int
    epochs: int
    window: int = 50

    def __len__(self) -> int:
        visual = int((self.lengths > 0).sum())
        return max(visual, len(self.lengths) - visual)

    def share(self, epoch: int) -> float:
        """Probability in [0, 1] that a sample of this epoch has a picture: 0 first, rising to 1 in the last epoch."""
        return min(1.0, max(0.0, (epoch + 1 - self.text_epochs) / (self.epochs - self.text_epochs)))

    def __call__(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch])
        is_visual = rng.random(len(self)) < self.share(epoch)
        rows = np.empty(len(self), dtype=np.int64)
        for kind, wanted in ((self.lengths > 0, is_visual), (self.lengths <= 0, ~is_visual)):
            rows[wanted] = np.resize(rng.permutation(np.flatnonzero(kind)), int(wanted.sum()))
        return in_buckets(rows, self.lengths, self.batch_size, self.window, rng)


def in_buckets(
    rows: np.ndarray, lengths: np.ndarray, batch_size: int, window: int, rng: np.random.Generator
) -> np.ndarray:
    """[n] shuffled `rows` in batches of like |lengths|; a last batch that is not full stays the last."""
    if window == 1:
        return rows.astype(np.int64)
    size = batch_size * window
    parts = [part[np.argsort(np.abs(lengths[part]), kind="stable")] for part in _cut(rows, size)]
    batches = [batch for part in parts for batch in _cut(part, batch_size)]
    full = [batch for batch in batches if len(batch) == batch_size]
    rest = [batch for batch in batches if len(batch) < batch_size]
    order = rng.permutation(len(full))
    return np.concatenate([*(full[i] for i in order), *rest]).astype(np.int64)


def _cut(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
