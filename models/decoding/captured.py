"""Passes as CUDA graphs, which `torch.cuda.make_graphed_callables` captures: one launch for all of a pass.

A graph repeats the kernels that were launched while it was recorded, on the addresses that they had. So a captured
function takes tensors of the same shapes each time, reads beside them only what stays in place (weights, a cache),
asks for no value on the host, and draws no random numbers. Source: PyTorch's documentation, "CUDA semantics".
Letters: N inputs of a pass, padded; K places that its attention reads.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .cache import Cache
from .parallel import is_cut

Run = Callable[..., tuple[Tensor, ...]]


def why_nowhere(parameters: Iterable[nn.Parameter], device: torch.device) -> str | None:
    """Why no pass that reads these parameters of a target can be captured; None: its place allows it.

    Args:
        device: where inputs go.
    """
    held = list(parameters)
    devices = {parameter.device for parameter in held}
    if len(devices) > 1:
        return f"the target lies on {len(devices)} devices"
    if device.type != "cuda":
        return f"the target is on a {device.type.upper()}"
    if any(map(is_cut, held)):
        return "several ranks hold the target together"
    return None


class Graphs:
    """Functions of tensors as graphs of one device, in one memory pool."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = 0.0  # that captures took
        self._pool: Any = None
        self._captured: dict[Hashable, Run] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def clear(self) -> None:
        """Forget all graphs, before tensors that they read go."""
        self._captured.clear()
        self._pool = None

    def __call__(self, key: Hashable, run: Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the function that was captured first for `key` and these shapes, `run` itself here, returns."""
        key = key, *(value.shape for value in inputs)
        if key not in self._captured:
            start = time.perf_counter()
            self._captured[key] = self._capture(run, inputs)
            self.seconds += time.perf_counter() - start
        return self._captured[key](*inputs)

    def _capture(self, run: Run, inputs: tuple[Tensor, ...]) -> Run:
        if self.device.type == "cpu":
            return run
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # A capture records what runs on the current device, and its inputs are where later ones are copied to.
        with torch.cuda.device(self.device), warnings.catch_warnings():
            warnings.filterwarnings("error", message="The CUDA Graph is empty")
            make: Any = torch.cuda.make_graphed_callables
            graph = make(run, tuple(value.clone() for value in inputs), pool=self._pool)
            torch.cuda.synchronize(self.device)
        # The next replay of any graph of the pool writes over what this one returned.
        return lambda *values: tuple(value.clone() for value in graph(*values))


class PassGraphs:
    """Passes of one model over one request at a time, whose inputs and places are rounded up; a mask hides the rest.

    The cache's buffers stay where they are for every request. What was accepted is committed outside of the graphs.

    Args:
        lengths: K, ascending; a request that may come to more gets a cache of its own, and eager passes.
        counts: N, ascending; passes over more inputs are run eagerly.
        make_cache: an empty cache of so many positions.
    """

    def __init__(
        self, device: torch.device, lengths: Sequence[int], counts: Sequence[int],
        make_cache: Callable[[int], Cache],
    ):  # fmt: skip
        self.lengths, self.counts, self.make_cache = tuple(lengths), tuple(counts), make_cache
        self.graphs = Graphs(device)
        self.num_replayed = self.num_eager = 0  # passes
        self._cache: Cache | None = None
        self._lent: Cache | None = None  # to the request that decodes: the same buffers
        self._placed: dict[str, Tensor] = {}

    @property
    def seconds(self) -> float:
        """That captures took."""
        return self.graphs.seconds

    @property
    def summary(self) -> str:
        """For the report."""
        counts = f"{len(self.graphs)} captured in {self.seconds:.1f} s, {self.num_replayed:,} passes replayed"
        most = f"longer than {self.lengths[-1]:,} places, more than {self.counts[-1]} nodes, or layers are hooked"
        return counts + (f", {self.num_eager:,} eager ({most})" if self.num_eager else "")

    def new_cache(self, needed: int) -> Cache:
        """An empty cache of at least `needed` positions: the static one where it is large enough."""
        self._lent = None
        if needed + self.counts[-1] > self.lengths[-1]:  # padding is written behind what counts
            return self.make_cache(needed)
        if self._cache is None:
            self._cache = self.make_cache(self.lengths[-1])
        self._cache.empty()
        self._lent = copy.copy(self._cache)
        return self._lent

    def in_place(self, name: str, value: Tensor) -> Tensor:
        """`value` of a request at the address that it has in all requests."""
        if self._lent is None:
            return value
        held = self._placed.get(name)
        if held is None or held.shape != value.shape:
            if held is not None:  # graphs read the old address
                self.graphs.clear()
            self._placed[name] = value.clone()
        else:
            held.copy_(value)
        return self._placed[name]

    def fit(self, cache: Cache, count: int, first: int = 0, *, hooked: bool = False) -> tuple[int, int] | None:
        """N and K of a pass over `count` inputs; None: it must be run eagerly.

        Args:
            first: places behind the cache's length that earlier passes of this cycle wrote.
            hooked: hooks change what layers see, and a graph would not ask them.

        Raises:
            RuntimeError: another request began since, in the same buffers.
        """
        if self._cache is not None and cache is not self._lent and cache.layers is self._cache.layers:
            raise RuntimeError("a later request took the graphs' cache: with graphs, one request decodes at a time")
        if cache is self._lent and count <= self.counts[-1] and not hooked:
            fixed = next(n for n in self.counts if n >= count)
            return fixed, next(k for k in self.lengths if k >= cache.length + first + fixed)
        self.num_eager += 1
        return None

    def run(self, key: Hashable, run: Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What `run` returns for padded inputs, by a graph where it can."""
        self.num_replayed += 1
        return self.graphs(key, run, *inputs)
