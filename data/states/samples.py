"""The sequences that a head learns from, for whoever computes their states: records with their own or the target's
answers, how many places each has, and which are held out.

Counting costs the text and the heads of picture files, no pixels: it tells a cache's size before the target runs, and
gives batches of like lengths that are the same whether states are computed or read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.batch import Batch
from ...core.pictures import TEXT
from ...core.states import feature_places
from ..collate import Sample, collate, empty_sample
from ..dataset import ConversationDataset
from ..loader import Subset
from ..records.records import read_arrays, write_arrays
from ..shards.codes import forward_seed
from ..sources import AnsweredSamples


@dataclass(frozen=True)
class Counts:
    """[n] int32 each: places of a sample, those whose H is read, visual ones, and supervised tokens: a sample of none
    leaves the order.
    """

    length: np.ndarray
    text: np.ndarray
    visual: np.ndarray
    supervised: np.ndarray

    @classmethod
    def of_ranks(cls, parts: Sequence[np.ndarray]) -> Counts:
        """`count_all` of every rank, as one."""
        whole = np.empty((sum(map(len, parts)), 4), dtype=np.int32)
        for rank, part in enumerate(parts):
            whole[rank :: len(parts)] = part
        return cls(*whole.T)

    @property
    def signed(self) -> np.ndarray:
        """Lengths as orders take them: negative without pictures."""
        return np.where(self.visual > 0, self.length, -self.length)


class StatesSamples:
    """Samples by number, with the records' own answers or (`answered`) those that the target wrote."""

    def __init__(self, dataset: ConversationDataset, answered: AnsweredSamples | None):
        self.dataset, self.answered = dataset, answered

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        return self.dataset[index] if self.answered is None else self.answered.row(index, 0).sample

    def outline(self, index: int) -> Sample:
        """The sample without its pixels; one that is left out has nothing to learn from."""
        answered = self.answered
        return self.dataset.counted(index) if answered is None else answered.row(index, 0, pixels=False).sample

    def draws(self) -> np.ndarray:
        """[n] int64, see `draw_of`."""
        return np.array([draw_of(self.dataset.sample_id(index)) for index in range(len(self))], dtype=np.int64)

    def count(self, index: int) -> tuple[int, int, int, int]:
        """One sample's row of `Counts`."""
        sample = self.outline(index)
        modality, loss_mask = torch.tensor([sample.modality]), torch.tensor([sample.loss_mask], dtype=torch.bool)
        text = feature_places(modality, torch.ones_like(loss_mask), loss_mask)
        return len(sample.ids), int(text.sum()), int((modality != TEXT).sum()), int(loss_mask[:, 1:].sum())

    def count_all(
        self,
        path: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        watch: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> np.ndarray:
        """[k,4] of this rank's samples (every `world_size`-th, by `watch`), kept in `path` for the next start."""
        path = path.with_name(f"{path.name}-{self.dataset.identity()[:16]}-{rank}-of-{world_size}.npz")
        mine = range(rank, len(self), world_size)
        arrays = read_arrays(path, {"counts": np.int32})
        if arrays is not None and arrays["counts"].shape == (len(mine), 4):
            return arrays["counts"]
        counts = np.array([self.count(index) for index in watch(mine)], dtype=np.int32).reshape(-1, 4)
        write_arrays(path, {"counts": counts})
        return counts


def draw_of(name: str) -> int:
    """Return 32 bits that follow from a sample's name: every machine and every source holds out the same samples."""
    return zlib.crc32(name.encode())


def split(draws: np.ndarray, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """Indices that are trained on, and those that are held out."""
    out = draws / 2**32 < held_out
    return np.flatnonzero(~out), np.flatnonzero(out)


class Chosen(Subset):
    """Some of the samples, as the loader reads them: an item is its number and the sample."""

    def __getitem__(self, index: int) -> tuple[int, Sample]:
        return int(self.indices[index]), super().__getitem__(index)


@dataclass(frozen=True)
class SeededCollate:
    """Numbered samples to a `Batch` whose rows have seeds and numbers."""

    pad_id: int
    image_size: int
    seed: int

    def __call__(self, samples: Sequence[tuple[int, Any]], *, epoch: int) -> Batch:
        rows = [sample for _, sample in samples] or [empty_sample(self.pad_id)]
        return replace(
            collate(rows, pad_id=self.pad_id, image_size=self.image_size),
            seeds=tuple(forward_seed(self.seed, epoch, row.sample_id) for row in rows),
            numbers=tuple(number for number, _ in samples),
        )
