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
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import first_line
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
    """Functions of tensors as graphs of one device, in one memory pool.

    Args:
        failed: gets why a capture failed, once: every pass is run eagerly from then on. None: torch's error is raised.
    """

    def __init__(self, device: torch.device, failed: Callable[[str], None] | None = None):
        self.device, self.failed = device, failed
        self.failure: str | None = None  # why a capture failed, after which all passes are eager
        self.seconds = 0.0  # that captures took, or their failure
        self.num_replayed = 0  # calls
        self.captured: dict[Hashable, Run] = {}
        self._pool: Any = None

    def clear(self) -> None:
        """Forget all graphs, before tensors that they read go."""
        self.captured.clear()
        self._pool = None

    def __call__(self, key: Hashable, run: Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the function that was captured first for `key` and these shapes, `run` itself here, returns."""
        key = key, *(value.shape for value in inputs)
        if self.failure is None and key not in self.captured:
            start = time.perf_counter()
            try:
                self.captured[key] = self._capture(run, inputs)
            except (RuntimeError, Warning) as error:
                self.give_up(error)
            self.seconds += time.perf_counter() - start
        self.num_replayed += self.failure is None
        return self.captured.get(key, run)(*inputs)

    def give_up(self, error: Exception) -> None:
        """Run everything eagerly from here on, and say why; raise the error where nobody asked to be told."""
        if self.failed is None:
            raise error
        self.clear()
        self.failure = _cause(error)
        self.failed(self.failure)

    def _capture(self, run: Run, inputs: tuple[Tensor, ...]) -> Run:
        if self.device.type == "cpu":
            return run
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream(self.device)
        # A capture records what runs on the current device, and its inputs are where later ones are copied to.
        with torch.cuda.device(self.device), warnings.catch_warnings():
            warnings.filterwarnings("error", message="The CUDA Graph is empty")
            make: Any = torch.cuda.make_graphed_callables
            try:
                graph = make(run, tuple(value.clone() for value in inputs), pool=self._pool)
            except (RuntimeError, Warning):
                self._leave_capture(stream)
                raise
            torch.cuda.synchronize(self.device)
        # The next replay of any graph of the pool writes over what this one returned.
        return lambda *values: tuple(value.clone() for value in graph(*values))

    def _leave_capture(self, stream: Any) -> None:
        """Undo what torch leaves where a capture breaks off: `capture_end` raises before it closes the memory pool and
        before the capture's stream is left. Source: torch's `cuda/graphs.py` and `CUDAGraph.cpp`.
        """
        torch.cuda.set_stream(stream)
        cuda: Any = torch._C
        with suppress(RuntimeError):  # the pool is closed
            cuda._cuda_endAllocateToPool(self.device.index, self._pool)
            cuda._cuda_releasePool(self.device.index, self._pool)
        # Torch with one state for all captures (2.13 has one for each) would leave random numbers in the capture.
        generator = torch.cuda.default_generators[self.device.index]
        generator.graphsafe_set_state(generator.clone_state())


def _cause(error: Exception) -> str:
    """What went wrong first, in one line: the end of a broken capture raises another error."""
    while isinstance(error.__context__, Exception):
        error = error.__context__
    return f"{type(error).__name__}: {first_line(error)}"


class PassGraphs(Graphs):
    """Passes of one model over one request at a time, whose inputs and places are rounded up; a mask hides the rest.

    The cache's buffers stay where they are for every request. What was accepted is committed outside of the graphs.

    Args:
        lengths: K, ascending; a request that may come to more gets a cache of its own, and eager passes.
        counts: N, ascending; passes over more inputs are run eagerly.
        make_cache: an empty cache of so many positions.
        failed: as of `Graphs`.
    """

    def __init__(
        self, device: torch.device, lengths: Sequence[int], counts: Sequence[int],
        make_cache: Callable[[int], Cache], failed: Callable[[str], None] | None = None,
    ):  # fmt: skip
        super().__init__(device, failed)
        self.lengths, self.counts, self.make_cache = tuple(lengths), tuple(counts), make_cache
        self.num_eager = 0  # passes
        self._cache: Cache | None = None
        self._lent: Cache | None = None  # to the request that decodes: the same buffers
        self._placed: dict[str, Tensor] = {}

    @property
    def summary(self) -> str:
        """For the report."""
        if self.failure is not None:
            return f"off since a capture failed ({self.failure}); replays before: {self.num_replayed:,}"
        counts = f"{len(self.captured)} captured in {self.seconds:.1f} s, {self.num_replayed:,} passes replayed"
        most = f"longer than {self.lengths[-1]:,} places, more than {self.counts[-1]} nodes, or layers are hooked"
        return counts + (f", {self.num_eager:,} eager ({most})" if self.num_eager else "")

    def new_cache(self, needed: int) -> Cache:
        """An empty cache of at least `needed` positions: the static one where it is large enough."""
        self._lent = None
        # Padding is written behind what counts.
        if self.failure is not None or needed + self.counts[-1] > self.lengths[-1]:
            return self.make_cache(needed)
        if self._cache is None:
            try:
                self._cache = self.make_cache(self.lengths[-1])
            except torch.OutOfMemoryError as error:  # it is longer than most requests
                self.give_up(error)
                return self.make_cache(needed)
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
                self.clear()
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
        outputs = self(key, run, *inputs)
        if self.failure is not None:  # the request goes on in the buffers, which end with it
            self.num_eager += 1
            self._cache = self._lent = None
            self._placed.clear()
        return outputs
