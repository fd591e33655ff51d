"""Slots: the drafter numbers the nodes that it has run in this cycle, and knows which of them each one attends to.

Letters: F new slots, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .tree import ROOT


class Slots:
    """Parents and depths of the slots of one cycle; a drafter that commits or starts a cycle takes new ones."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.depths: list[int] = []

    def __len__(self) -> int:
        return len(self.parents)

    def take(self, parents: Sequence[int]) -> list[int]:
        """Give each of `parents` (slots or ROOT) a child in the next slots; returns the children's depths (root 0)."""
        depths = [1 if p == ROOT else self.depths[p] + 1 for p in parents]
        self.parents += parents
        self.depths += depths
        return depths

    def extends_chain(self, count: int) -> bool:
        """Whether the last `count` slots are a single one that extends a chain of all others: it then needs no mask."""
        return count == 1 and self.parents[-1] == len(self) - 2 and self.depths[-1] == len(self)

    def ancestors(self, first: int, *, past: int = 0) -> Tensor:
        """[F,past+S] bool: which slots each of the slots from `first` on sees: itself and its ancestors, and all of the
        `past` committed positions before them.
        """
        # numpy: single entries of a tensor take ten times as long to set.
        mask = np.zeros((len(self) - first, past + len(self)), dtype=bool)
        mask[:, :past] = True
        for row, slot in enumerate(range(first, len(self))):
            while slot != ROOT:
                mask[row, past + slot] = True
                slot = self.parents[slot]
        return torch.from_numpy(mask)
