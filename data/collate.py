"""Samples to a right-padded batch that always carries a picture.

Letters: B rows, T tokens, I tiles, S side in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..core.batch import TEXT, Batch
from ..core.pictures import Picture


@dataclass(frozen=True)
class Sample:
    """One conversation, encoded."""

    ids: list[int]
    loss_mask: list[bool]
    modality: list[int]
    pixels: Tensor | None  # [I,3,S,S]
    sample_id: str
    pictures: tuple[Picture, ...] = ()  # how the tiles of `pixels` become runs; none: each tile is a plain picture


def empty_sample(pad_id: int) -> Sample:
    """A row that supervises nothing: it fills the place of a rank that the last partial batch leaves without rows."""
    return Sample([pad_id, pad_id], [False, False], [TEXT, TEXT], None, "(filler)")


def collate(samples: Sequence[Sample], *, pad_id: int, image_size: int) -> Batch:
    """Pad on the right; where no row has a picture, a zero dummy keeps every rank's vision tower running."""
    rows, length = len(samples), max(len(s.ids) for s in samples)
    ids = torch.full((rows, length), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(rows, length, dtype=torch.bool)
    loss_mask = torch.zeros(rows, length, dtype=torch.bool)
    modality = torch.zeros(rows, length, dtype=torch.int8)
    for row, sample in enumerate(samples):
        n = len(sample.ids)
        # Through NumPy, which takes an eighth of torch's time for a list.
        ids[row, :n] = torch.from_numpy(np.array(sample.ids, dtype=np.int64))
        attention_mask[row, :n] = True
        loss_mask[row, :n] = torch.from_numpy(np.array(sample.loss_mask, dtype=bool))
        modality[row, :n] = torch.from_numpy(np.array(sample.modality, dtype=np.int8))
    images = [s.pixels for s in samples if s.pixels is not None]
    dummy = 0 if images else 1
    pictures = torch.cat(images) if images else torch.zeros(1, 3, image_size, image_size)
    positions = torch.arange(length).expand(1, rows, length)
    names = tuple(s.sample_id for s in samples)
    layouts = tuple(picture for s in samples for picture in s.pictures)
    return Batch(ids, attention_mask, loss_mask, modality, positions, pictures, names, dummy, pictures=layouts)


@dataclass(frozen=True)
class ConversationCollate:
    """`collate` as the loader calls it; nothing is drawn at random."""

    pad_id: int
    image_size: int

    def __call__(self, samples: Sequence[Sample], *, epoch: int) -> Batch:
        return collate(samples or [empty_sample(self.pad_id)], pad_id=self.pad_id, image_size=self.image_size)
