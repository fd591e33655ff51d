"""A preallocated key-value cache whose length belongs to the caller.

Verification writes a tree's nodes after the committed tokens. `commit` keeps the accepted path, and a rollback only
changes the length. Heads and our own models use it as it is, transformers' models as `ModelCache`. Letters: R rows,
H heads, L capacity, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ...core.states import uploaded


class CacheLayer:
    """Keys and values [R,H,L,D] of one layer, written at `length`."""

    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int):
        self.is_initialized = False
        self.capacity = capacity
        self.length = 0
        self.places: Tensor | None = None  # [N] int64 on the device: write there and hand over the first `reach`
        self.reach = capacity
        self.first = 0  # keys and values before it are kept and not handed over

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate `capacity` positions for keys and values of this shape, [R,H,N,D]."""
        rows, heads, _, width = key_states.shape
        # Zeros: places that were never written are masked, and a mask does not hide a NaN.
        self.keys = key_states.new_zeros(rows, heads, self.capacity, width)
        self.values = value_states.new_zeros(rows, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [R,H,N,D] after `length`. Returns all from `first` to the written ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.places is not None:
            self.keys.index_copy_(2, self.places, key_states)
            self.values.index_copy_(2, self.places, value_states)
            return self.keys[:, :, : self.reach], self.values[:, :, : self.reach]
        end = self.length + key_states.shape[2]
        assert end <= self.capacity, f"cache of {self.capacity} positions asked to hold {end}"
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, self.first : end], self.values[:, :, self.first : end]


class Cache:
    """The key-value cache of every model. A forward writes after `length`; the caller commits by moving `length`."""

    layer_class: ClassVar[type[CacheLayer]] = CacheLayer

    def __init__(self, num_layers: int, capacity: int):
        self.layers: list[Any] = [self.layer_class(capacity) for _ in range(num_layers)]
        self.capacity = capacity
        self._positions: Tensor | None = None  # [R,L] int64 of the keys, where `place` is called

    @property
    def kv_layers(self) -> list[CacheLayer]:
        """`layers` with their type: caches of some families have layers of other kinds beside these."""
        return cast(list[CacheLayer], self.layers)

    @property
    def length(self) -> int:
        """Number of committed positions."""
        return self.kv_layers[0].length

    def place(self, positions: Tensor, rows: int) -> Tensor:
        """Note the positions [1,N] or [R,N] of the next N tokens; returns those of all places so far, [R,K].

        Layers with a window (Gemma 4) ask for it before each forward: windows are counted in positions, nodes of one
        depth share theirs, and a prompt may be padded or pruned.
        """
        assert self._positions is not None or self.length == 0, "the cache was filled without positions"
        if self._positions is None:
            self._positions = torch.zeros(rows, self.capacity, dtype=torch.int64, device=positions.device)
        end = self.length + positions.shape[1]
        assert end <= self.capacity, f"cache of {self.capacity} positions asked to hold {end}"
        self._positions[:, self.length : end] = positions
        return self._positions[:, :end]

    def advance(self, count: int) -> None:
        """Commit the first `count` positions that the last forward wrote."""
        self.crop_to(self.length + count)

    def crop_to(self, length: int) -> None:
        """Set the number of committed positions and forget the later ones."""
        for layer in self.kv_layers:
            layer.length = length

    def hand_over_from(self, first: int) -> None:
        """Let forwards read no position before `first`, as a layer with a window does."""
        for layer in self.kv_layers:
            layer.first = first

    def empty(self) -> None:
        """Forget all positions. A mask hides what they held, but not a NaN: it goes, too."""
        self.crop_to(0)
        self._positions = None
        for layer in self.kv_layers:
            if layer.is_initialized:
                layer.keys.zero_()
                layer.values.zero_()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        for layer in self.kv_layers:
            layer.keys, layer.values = layer.keys[list(rows)], layer.values[list(rows)]
        if self._positions is not None:
            self._positions = self._positions[list(rows)]

    @contextmanager
    def written_at(self, places: Tensor, reach: int | None = None) -> Iterator[None]:
        """Within it, forwards write at `places` [N] int64 and return the first `reach` positions (None: the whole
        capacity), as CUDA graphs need.
        """
        for layer in self.kv_layers:
            layer.places, layer.reach = places, reach or layer.capacity
        try:
            yield
        finally:
            for layer in self.kv_layers:
                layer.places = None

    def commit(self, written: Sequence[int]) -> None:
        """Keep the positions `written` (counted from `length`) of what the last forwards wrote, in that order."""
        self._gather(written)
        self.advance(len(written))

    def _gather(self, written: Sequence[int]) -> None:
        """Move keys and values at `written` after the committed ones."""
        if list(written) != list(range(len(written))):
            start = self.length
            index = torch.tensor([start + w for w in written])
            # A large target's layers lie on several devices: one copy of the index goes to each.
            on = {device: uploaded(index, device) for device in {layer.keys.device for layer in self.kv_layers}}
            for layer in self.kv_layers:
                here = on[layer.keys.device]
                layer.keys[:, :, start : start + len(written)] = layer.keys[:, :, here]
                layer.values[:, :, start : start + len(written)] = layer.values[:, :, here]
            if self._positions is not None:
                here = uploaded(index, self._positions.device)
                self._positions[:, start : start + len(written)] = self._positions[:, here]
