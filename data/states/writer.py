"""Writes states to shards. The samples of each shard are fixed beforehand, so a killed build can skip the shards that
it finished.

Samples are dealt to shards by a fixed shuffle: shards of mixed data get one size, and ranks like loads.
Letters: B rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.batch import Batch
from ...core.finite import check_states
from ...core.pictures import TEXT
from ...core.states import Taps, TargetStates
from ..shards.shards import Sample, write_shard
from .dtypes import StatesDtype
from .records import COLUMNS, record
from .samples import Counts, draw_of

_DEAL = 5  # of the shuffle that deals samples to shards: no seed of a recipe's, caches are shared


@dataclass(frozen=True)
class Deal:
    """Which samples lie in which shard, `per_shard` in each."""

    num_samples: int
    per_shard: int

    def __len__(self) -> int:
        """Shards."""
        return -(-self.num_samples // self.per_shard)

    def __getitem__(self, shard: int) -> np.ndarray:
        """[n] int64 numbers of samples, ascending."""
        order = np.random.default_rng(_DEAL).permutation(self.num_samples)
        return np.sort(order[shard * self.per_shard : (shard + 1) * self.per_shard])


def batches(numbers: np.ndarray, counts: Counts, size: int) -> list[list[int]]:
    """A shard's samples in micro-batches of like lengths: padding costs as much as text."""
    alike = numbers[np.argsort(counts.length[numbers], kind="stable")].tolist()
    return [alike[start : start + size] for start in range(0, len(alike), size)]


@dataclass(frozen=True)
class StatesWriting:
    """How rows of states become samples of shards.

    Args:
        folder: of the shards.
        counts: of all samples: a record says its length as it was counted, so that every source orders alike.
    """

    folder: Path
    wanted: Taps
    dtype: StatesDtype
    counts: Counts

    def write(self, index: int, samples: Iterable[Sample]) -> None:
        """Write shard number `index`: it is whole or not there."""
        write_shard(self.folder, index, samples, {}, columns=COLUMNS)

    def samples(self, batch: Batch, states: TargetStates, numbers: Sequence[int]) -> Iterator[Sample]:
        """Yield key, tensors and info of each row of `batch` but fillers; `numbers` are those of its samples. Raises
        `NotFinite`: states of a sample hold NaN or infinity.
        """
        check_states(states, batch.sample_ids[: len(numbers)])
        for row, number in enumerate(numbers):
            name = batch.sample_ids[row]
            info = {
                "name": name,
                "number": number,
                "length": int(self.counts.length[number]),
                "visual": int(bool((batch.modality[row] != TEXT).any())),
                "supervised": int(batch.loss_mask[row, 1:].sum()),
                "draw": draw_of(name),
            }
            yield f"{number:09d}", record(batch, states, row, self.wanted, self.dtype), info
