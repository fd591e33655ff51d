"""Encoded pictures for training: samples of shards, a held-out share of them, and micro-batches.

Condition dropout is drawn in the collation, from the sample's name and the epoch: a picture that lost its condition in
one epoch has it in the next, on whichever rank, and nothing of it is written into a cache. What a forward draws (a
head's noise) starts from a seed that is made in the same way.
Letters: B rows, n codes, S side in pixels.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...core.batch import CodeBatch, PictureBatch
from ...core.fields import Place
from ...core.json_types import JsonObject
from ...core.section import Section
from .shards import ShardReader


class ShardData(Section):
    """Shards that an `encode` or `regenerate` stage wrote."""

    # Of a train stage's `data`: codes and pictures, not conversations. Targets that draw images need not say it.
    kind: Literal["codes"] = Field("codes", exclude=True)
    # The stage that wrote them; null with path null: the latest that did.
    from_stage: str | None = Field(None, alias="from")
    # A folder of shards from elsewhere.
    path: Place | None = None
    # Share of the samples that is kept for validation, by their numbers (the papers: 5%).
    held_out: float = Field(0.0, ge=0, lt=1)
    max_samples: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_place(self) -> ShardData:
        if self.from_stage is not None and self.path is not None:
            raise ValueError("give from or path, not both")
        return self


@dataclass(frozen=True)
class ShardSample:
    """One sample as it lies in a shard."""

    key: str
    tensors: dict[str, Tensor]
    info: JsonObject


class ShardSamples:
    """Training or held-out samples of a folder of shards, as the loader reads them."""

    def __init__(self, folder: Path, data: ShardData, *, held_out: bool = False, most: int | None = None):
        self.reader = ShardReader(folder)
        count = min(len(self.reader), data.max_samples or len(self.reader))
        if data.held_out:
            # By number, not by key: telling keys apart would read every sample.
            draws = np.array([zlib.crc32(b"%d" % i) for i in range(count)]) / 2**32
            self.indices = np.flatnonzero((draws < data.held_out) == held_out)[:most]
        else:
            self.indices = np.arange(0 if held_out else count)[:most]
        self.lengths = np.ones(len(self.indices), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> ShardSample:
        return ShardSample(*self.reader[int(self.indices[index])])


@dataclass(frozen=True)
class CodeCollate:
    """Samples to a `CodeBatch`."""

    condition: Callable[[ShardSample], Tensor]  # what a sample was asked for by, in the target family's own form
    template: ShardSample  # a sample for fillers
    seed: int
    dropout: float  # share of rows that lose their condition, drawn anew in each epoch
    supervised_per_row: int  # tokens that a row is trained on

    def __call__(self, samples: Sequence[ShardSample], *, epoch: int) -> CodeBatch:
        rows = samples or [self.template]
        return CodeBatch(
            codes=torch.stack([s.tensors["codes"].long() for s in rows]),
            conditions=tuple(self.condition(s) for s in rows),
            uncond=torch.tensor([loses_condition(self.seed, epoch, s.key, self.dropout) for s in rows]),
            real=torch.full((len(rows),), bool(samples)),
            sample_ids=tuple(s.key for s in rows),
            supervised_per_row=self.supervised_per_row,
            seeds=tuple(forward_seed(self.seed, epoch, s.key) for s in rows),
        )


@dataclass(frozen=True)
class PictureCollate:
    """Samples with `pixels` [3,S,S] uint8 to a `PictureBatch`; `labels` are positions of named truths in lists."""

    template: ShardSample
    labels: Callable[[ShardSample], Tensor]

    def __call__(self, samples: Sequence[ShardSample], *, epoch: int) -> PictureBatch:
        rows = samples or [self.template]
        return PictureBatch(
            pixels=torch.stack([s.tensors["pixels"] for s in rows]),
            labels=torch.stack([self.labels(s) for s in rows]),
            real=torch.full((len(rows),), bool(samples)),
            sample_ids=tuple(s.key for s in rows),
        )


def loses_condition(seed: int, epoch: int, name: str, share: float) -> bool:
    """Whether a sample is unconditional in this epoch: a pure function, so that any rank and any resume agrees."""
    return random.Random(f"{seed}/{epoch}/{name}").random() < share


def forward_seed(seed: int, epoch: int, name: str) -> int:
    """What a sample's random draws in this epoch's forward start from; of 63 bits, on any rank and any resume."""
    return random.Random(f"forward/{seed}/{epoch}/{name}").getrandbits(63)
