"""In which order samples are trained on: a pure function of (seed, epoch, lengths, batch size).

It does not depend on the number of ranks. Grouping follows LLaVA's `group_by_modality_length`: a global batch holds
pictures or text only, and ranks take its rows so that they carry like loads. The bucketed orders keep padding small.
With packing, a step has the samples that it has without, so learning rates, epochs and resuming are the same; rows have
about as many tokens each, the same number of rows on every rank: longest sample first to the row with the fewest tokens
(Graham's LPT, 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from ..core.errors import UserError
from ..core.section import Section

WINDOW = 50  # batches that a bucketed order sorts together


def epoch_order(lengths: np.ndarray, *, seed: int, epoch: int, batch_size: int, grouped: bool) -> np.ndarray:
    """Sample indices [n] int64 in training order; with `grouped`, global batches of one modality come whole and the
    rest last. `lengths` are words per sample, negative for text-only ones.
    """
    rng = np.random.default_rng([seed, epoch])
    if not grouped:
        return rng.permutation(len(lengths)).astype(np.int64)
    images, texts = (rng.permutation(part) for part in (np.flatnonzero(lengths > 0), np.flatnonzero(lengths <= 0)))
    shuffled = rng.permutation(num_full_megabatches(len(images), len(texts), batch_size))
    return arrange(np.abs(lengths), images, texts, shuffled, megabatch=batch_size, num_bins=1)


def num_full_megabatches(num_images: int, num_texts: int, megabatch: int) -> int:
    """Megabatches of one modality; the last of each modality, full or not, goes to the mixed tail."""
    return sum(max(-(-n // megabatch) - 1, 0) for n in (num_images, num_texts))


def arrange(
    lengths: np.ndarray,
    images: np.ndarray,
    texts: np.ndarray,
    megabatch_order: np.ndarray,
    *,
    megabatch: int,
    num_bins: int,
) -> np.ndarray:
    """LLaVA's grouping with its random draws given: shuffled indices by modality and an order of the
    `num_full_megabatches`. That is unused where one modality stands alone, whose megabatches keep their order and whose
    last one is dealt like the others. A megabatch is dealt into `num_bins` parts of equal size (ranks times
    accumulation) by words per sample.
    """
    dealt = [
        [np.concatenate(bins_of(part, lengths, num_bins)) for part in _cut(kind, megabatch)] for kind in (images, texts)
    ]
    if not all(dealt):
        return np.concatenate([*dealt[0], *dealt[1], np.empty(0, dtype=np.int64)]).astype(np.int64)
    full = [*dealt[0][:-1], *dealt[1][:-1]]
    tail = np.sort(np.concatenate([dealt[0][-1], dealt[1][-1]]))
    return np.concatenate([*(full[i] for i in megabatch_order), tail]).astype(np.int64)


def bins_of(indices: np.ndarray, lengths: np.ndarray, num_bins: int) -> list[np.ndarray]:
    """Deal rows longest first, each to the bin with the smallest sum of lengths that has room. Rows that cannot be
    shared evenly go round the bins in turn, as in LLaVA's code.
    """
    ranked = sorted(indices.tolist(), key=lambda i: lengths[i], reverse=True)
    if len(ranked) % num_bins:
        return [np.array(ranked[b::num_bins], dtype=np.int64) for b in range(num_bins)]
    room = len(ranked) // num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    sums = [0.0] * num_bins
    for index in ranked:
        smallest = sums.index(min(sums))
        bins[smallest].append(index)
        sums[smallest] += int(lengths[index])
        if len(bins[smallest]) == room:
            sums[smallest] = float("inf")
    return [np.array(indices, dtype=np.int64) for indices in bins]


def rows_of_rank(batch: np.ndarray, lengths: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """The rows of a global batch ([n] indices of samples) that a rank computes, so that all ranks have about as many
    tokens; one rank takes them in their order. `lengths` are of all samples, of any sign.
    """
    if world_size == 1:
        return batch
    return batch[bins_of(np.arange(len(batch)), np.abs(lengths[batch]), world_size)[rank]]


@dataclass(frozen=True)
class BucketedOrder:
    """Every sample once: shuffled, sorted by length within windows of batches, and the batches shuffled."""

    lengths: np.ndarray  # [n], negative without pictures
    seed: int
    batch_size: int
    window: int = WINDOW  # batches that are sorted together; 1 leaves the shuffled order alone
    apart: bool = False  # batches of one modality; those that are left of both come last, and one of them may be mixed

    def __len__(self) -> int:
        return len(self.lengths)

    def __call__(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch])
        if self.apart:
            kinds = [rng.permutation(np.flatnonzero(kind)) for kind in (self.lengths > 0, self.lengths <= 0)]
            return in_buckets(kinds, self.lengths, self.batch_size, self.window, rng)
        return in_buckets([rng.permutation(len(self.lengths))], self.lengths, self.batch_size, self.window, rng)


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
    window: int = WINDOW

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
        return in_buckets([rows], self.lengths, self.batch_size, self.window, rng)


# Which samples an epoch has, in which order: `order(epoch)` is [rows] int64, and `len(order)` the rows of an epoch.
Order = BucketedOrder | RisingVisualOrder


def in_buckets(
    kinds: Sequence[np.ndarray], lengths: np.ndarray, batch_size: int, window: int, rng: np.random.Generator
) -> np.ndarray:
    """[n] the shuffled rows of all `kinds` in batches of like |lengths| and of one kind; what fills no batch stays
    last. `window` batches are sorted together; 1: one kind is left as it is.
    """
    if window == 1 and len(kinds) == 1:
        return kinds[0].astype(np.int64)
    full: list[np.ndarray] = []
    rest: list[np.ndarray] = []
    for rows in kinds:
        for part in _cut(rows, batch_size * window):
            order = part[np.argsort(np.abs(lengths[part]), kind="stable")] if window > 1 else part
            for batch in _cut(order, batch_size):
                (full if len(batch) == batch_size else rest).append(batch)
    shuffled = rng.permutation(len(full))
    return np.concatenate([*(full[i] for i in shuffled), *rest]).astype(np.int64)


def _cut(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


class PackingConfig(Section):
    """Several samples one after another in a row, each attending to itself alone."""

    # Tokens of a row, which is one forward on one rank: as many as fit in memory, and at least the longest sample's.
    max_tokens: int = Field(ge=8)


def packed_rows(lengths: np.ndarray, max_tokens: int, num_ranks: int) -> list[list[np.ndarray]]:
    """Micro-batch, rank -> which of the samples ([n] tokens each) are in that row, perhaps none."""
    assert lengths.max() <= max_tokens, f"a sample of {lengths.max()} tokens for rows of {max_tokens}"
    count = -(-int(lengths.sum()) // (max_tokens * num_ranks))
    while True:
        rows = _balanced(lengths, count * num_ranks)
        if max(tokens for tokens, _ in rows) <= max_tokens:
            break
        count += 1
    # Rows of like length are computed at the same time; every other time in turn, so that ranks' sums are alike.
    rows.sort(key=lambda row: -row[0])
    micro = [rows[start : start + num_ranks] for start in range(0, len(rows), num_ranks)]
    micro = [part[::-1] if number % 2 else part for number, part in enumerate(micro)]
    return [[np.array(sorted(places), dtype=np.int64) for _, places in part] for part in micro]


def _balanced(lengths: np.ndarray, count: int) -> list[tuple[int, list[int]]]:
    """Tokens and samples of `count` rows, longest sample first to the row with the fewest tokens."""
    heap = [(0, number) for number in range(count)]
    rows: list[list[int]] = [[] for _ in range(count)]
    for place in np.argsort(-lengths, kind="stable").tolist():
        tokens, number = heap[0]
        rows[number].append(place)
        heapq.heapreplace(heap, (tokens + int(lengths[place]), number))
    return [(tokens, rows[number]) for tokens, number in heap]


def check_lengths(lengths: np.ndarray, max_tokens: int, key: str) -> None:
    """Raises `UserError` for a sample that fits no row."""
    longest = int(np.abs(lengths).max(initial=0))
    if longest > max_tokens:
        hint = f"set packing.max_tokens to {longest} or more, or data.max_length to {max_tokens} or less"
        raise UserError(f"a sample has {longest} tokens, and a row {max_tokens}", key=key, hint=hint)
