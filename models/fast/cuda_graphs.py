"""Passes over few positions as CUDA graphs, which `torch.cuda.make_graphed_callables` captures: one launch for a pass.

A graph repeats the kernels that were launched while it was recorded, on the addresses that they had. So inputs and
places are rounded up, a mask hides the rest, and the cache stays where it is for every request; a captured function
asks for no value on the host and draws no random numbers. No GPU has run this: `scripts/check_gpu.py` compares.
Letters: R rows, N inputs of a pass, padded; K places that its attention reads.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.errors import first_line
from ...core.ranks import notice

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)  # N

Run = Callable[..., tuple[Tensor, ...]]


def lengths_up_to(capacity: int) -> tuple[int, ...]:
    """K: 256, 512, 1024, ...: the last at `capacity` or above."""
    return tuple(256 << n for n in range(max(1, (capacity - 1).bit_length() - 7)))


class Graphs:
    """Passes of one model over one request at a time, of at most `capacity` places: longer ones run eagerly.
    `make_cache` makes an empty cache of so many positions.
    """

    def __init__(self, device: torch.device, capacity: int, make_cache: Callable[[int], Any]):
        self.device, self.make_cache = device, make_cache
        self.lengths = lengths_up_to(capacity + COUNTS[-1])
        self.captured: dict[Hashable, Run] = {}
        self.failure: str | None = None  # why a capture failed, after which all passes are eager
        self.seconds, self.num_replayed, self.num_eager = 0.0, 0, 0
        self._cache: Any = None
        self._lent: Any = None  # to the request that decodes: the same buffers
        self._pool: Any = None

    @property
    def summary(self) -> str:
        """For the report."""
        if self.failure is not None:
            return f"off since a capture failed ({self.failure})"
        return (f"{len(self.captured)} captured in {self.seconds:.1f} s, {self.num_replayed:,} passes replayed, "
                f"{self.num_eager:,} eager")  # fmt: skip

    def new_cache(self, needed: int) -> Any:
        """An empty cache of at least `needed` positions: that of the graphs where it is large enough."""
        self._lent = None
        if self.failure is not None or needed + COUNTS[-1] > self.lengths[-1]:  # padding is written behind what counts
            return self.make_cache(needed)
        if self._cache is None:
            self._cache = self.make_cache(self.lengths[-1])
        self._cache.empty()
        self._lent = copy.copy(self._cache)
        return self._lent

    def take(self, cache: Any, count: int) -> bool:
        """Whether a pass over `count` inputs is run by a graph; a prompt is not.

        Raises `RuntimeError` where another request began since, in the same buffers.
        """
        if self._cache is not None and cache is not self._lent and cache.layers is self._cache.layers:
            raise RuntimeError("a later request took the graphs' cache: with graphs, one request decodes at a time")
        takes = self.failure is None and cache is self._lent and cache.length > 0 and count <= COUNTS[-1]
        self.num_eager += not takes and cache.length > 0
        return takes

    def __call__(
        self, key: Hashable, run: Run, cache: Any, mask: Tensor | None, *inputs: tuple[Tensor, int]
    ) -> tuple[Tensor, ...]:
        """What `run(mask, *inputs)` returns, [R,count,...] each; the first function of a `key` is the one captured.
        `mask` [count,k] or [R,count,k] bool is over the last k of the committed and new places (None: causal); each of
        `inputs` is a tensor with its dimension of `count` inputs.
        """
        past, count = cache.length, inputs[0][0].shape[inputs[0][1]]
        fixed = next(n for n in COUNTS if n >= count)
        reach = next(k for k in self.lengths if k >= past + fixed)
        mask = torch.ones(count, count, dtype=torch.bool, device=self.device).tril() if mask is None else mask
        rows, end = 1 if mask.dim() == 2 else len(mask), past + count
        visible = mask.new_zeros(rows, fixed, reach)
        visible[..., : max(1, end - mask.shape[-1])] = True  # padding too: an empty row of attention is undefined
        visible[:, :count, end - mask.shape[-1] : end] = mask
        places = torch.arange(past, past + fixed, device=self.device)
        padded = [F.pad(value, [0, 0] * ((-1 - dim) % value.dim()) + [0, fixed - count]) for value, dim in inputs]

        def written(places: Tensor, visible: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            with cache.written_at(places, reach):
                return run(visible, *values)

        values = (places, visible, *padded)
        key = key, reach, *(value.shape for value in values)
        if key not in self.captured:
            self.captured[key] = self._capture(written, values)
        self.num_replayed += self.failure is None
        # The next replay of any graph of the pool writes over what this one returned.
        return tuple(output[:, :count].clone() for output in self.captured[key](*values))

    def _capture(self, run: Run, inputs: tuple[Tensor, ...]) -> Run:
        if self.device.type != "cuda" or self.failure is not None:
            return run
        start, stream = time.perf_counter(), torch.cuda.current_stream(self.device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        make: Any = torch.cuda.make_graphed_callables
        try:
            # A capture records what runs on the current device, and its inputs are where later ones are copied to.
            with torch.cuda.device(self.device):
                run = make(run, tuple(value.clone() for value in inputs), pool=self._pool)
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # torch leaves the capture's stream where one breaks off
            self.failure = f"{type(error).__name__}: {first_line(error)}"
            notice(f"passes run eagerly from here on: a CUDA graph could not be captured ({self.failure})")
        self.seconds += time.perf_counter() - start
        return run
