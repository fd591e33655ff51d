"""Numbers the tree nodes that a drafter has expanded in this cycle, and knows which expansions each one attends to.

Letters: F new expansions, S expansions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .tree import ROOT


class Expansions:
    """Parents and depths of the expansions of one cycle. A drafter makes a new object for each cycle."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.depths: list[int] = []

    def __len__(self) -> int:
        return len(self.parents)

    def take(self, parents: Sequence[int]) -> list[int]:
        """Give each of `parents` (expansions or ROOT) a child in the next expansions; returns the children's depths
        (root 0).
        """
        depths = [1 if p == ROOT else self.depths[p] + 1 for p in parents]
        self.parents += parents
        self.depths += depths
        return depths

    def extends_chain(self, count: int) -> bool:
        """Whether the last expansion is alone (`count` is 1) and extends a chain of all others. It then needs no
        mask.
        """
        return count == 1 and self.parents[-1] == len(self) - 2 and self.depths[-1] == len(self)

    def ancestors(self, first: int, *, past: int = 0) -> Tensor:
        """[F,past+S] bool: which expansions each of the expansions from `first` on sees: itself and its ancestors, and
        all of the `past` committed positions before them.
        """
        # numpy: single entries of a tensor take ten times as long to set.
        mask = np.zeros((len(self) - first, past + len(self)), dtype=bool)
        mask[:, :past] = True
        for row, expansion in enumerate(range(first, len(self))):
            while expansion != ROOT:
                mask[row, past + expansion] = True
                expansion = self.parents[expansion]
        return torch.from_numpy(mask)


def accepted_expansions(verified: Any) -> list[int]:
    """The accepted path's expansions, up to the first node that the drafter has not expanded."""
    expansions = (verified.tree.expansions[node] for node in verified.path)
    return list(itertools.takewhile(lambda expansion: expansion != ROOT, expansions))
