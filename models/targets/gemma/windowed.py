"""A key-value cache that knows the position of each of its keys, because attention windows are counted in positions.

A tree's nodes of one depth share a position, and a prompt may be padded or pruned, so that places in the cache do not
tell how far two tokens are apart. Letters: R rows, N new positions, K places written so far, L capacity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....core.states import uploaded
from ...decoding.model_cache import ModelCache


class WindowedCache(ModelCache):
    """A cache as any other, whose `place` is called before the forward that writes keys and values.

    Args:
        num_layers: that have keys and values of their own; layers that share another's write none.
    """

    def __init__(self, num_layers: int, capacity: int):
        super().__init__(num_layers, capacity)
        self._positions: Tensor | None = None  # [R,L] int64

    def place(self, positions: Tensor, rows: int) -> Tensor:
        """Write the positions [1,N] or [R,N] of N new tokens after `length`. Returns those of all places, [R,K]."""
        if self._positions is None:
            self._positions = torch.zeros(rows, self.capacity, dtype=torch.int64, device=positions.device)
        end = self.length + positions.shape[1]
        assert end <= self.capacity, f"cache of {self.capacity} positions asked to hold {end}"
        self._positions[:, self.length : end] = positions
        return self._positions[:, :end]

    def empty(self) -> None:
        """Forget all positions."""
        super().empty()
        self._positions = None

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        super().select_rows(rows)
        if self._positions is not None:
            self._positions = self._positions[list(rows)]

    def _gather(self, written: Sequence[int]) -> None:
        super()._gather(written)
        if self._positions is not None and list(written) != list(range(len(written))):
            start = self.length
            index = uploaded(torch.tensor([start + place for place in written]), self._positions.device)
            self._positions[:, start : start + len(written)] = self._positions[:, index]
