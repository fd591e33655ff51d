"""The passes of a head as CUDA graphs: what a cycle begins with, and each level of its tree.

A head is one layer and an LM head, some sixty kernels for a few nodes: the host is what it waits for. Each pass is
captured for fixed numbers of inputs and lengths, both rounded up, and serves every head, tree and chain: what is not
there is hidden by a mask. The key-value cache, the outputs that a tree's nodes read and what a request gives to all of
its passes stay where they are for every request.
Letters: R rows, N inputs, D width, J joined states, F nodes, S expansions of a cycle, K places, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.states import uploaded
from ..decoding.cache import Cache
from ..decoding.captured import Graphs, why_nowhere
from ..targets.base import Target

# Of a pass. EAGLE's trees expand ten nodes at once, and paths are a few tokens long.
COUNTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)
# Of a cycle; a mask of a level has so many columns.
MOST_EXPANSIONS = 256

# (states, tokens, positions, mask, steps since the last true state) -> outputs [R,N,D], as of `Recursive._run`
Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Score = Callable[[Tensor], Tensor]  # outputs [R,F,D] -> q [F,V]


def why_not(target: Target) -> str | None:
    """Why no head can be captured beside this target, whose embedding and LM head its passes read; None: it can."""
    decoder: Any = getattr(target, "decoder", target)  # image generators may be one themselves
    if getattr(getattr(target, "guidance", None), "interval", -1) >= 0:
        return "guidance ends within a picture, so that scores depend on the token's number"
    return why_nowhere(decoder.model.parameters(), target.device)


class HeadGraphs:
    """Passes of one head over one request at a time.

    Args:
        lengths: K, ascending; a request that may come to more gets a cache of its own, and eager passes.
        counts: N and F, ascending; passes over more inputs are run eagerly.
    """

    def __init__(self, device: torch.device, lengths: Sequence[int], counts: Sequence[int] = COUNTS):
        self.lengths, self.counts = tuple(lengths), tuple(counts)
        self.graphs = Graphs(device)
        self.num_replayed = self.num_eager = 0  # passes
        self._cache: Cache | None = None
        self._lent: Cache | None = None  # to the request that decodes: the same buffers
        self._grown = -1  # expansions of this cycle that stand in `_outputs`; -1: not even the root's output
        self._roots: dict[int, _RootInputs] = {}
        self._levels: dict[int, _LevelInputs] = {}
        self._placed: dict[str, Tensor] = {}
        self._outputs: Tensor | None = None  # [R,1+S+F,D]
        self._next: Tensor | None = None  # [R,1] position of the root's children

    @property
    def seconds(self) -> float:
        """That captures took."""
        return self.graphs.seconds

    @property
    def summary(self) -> str:
        """For the report."""
        counts = f"{len(self.graphs)} captured in {self.seconds:.1f} s, {self.num_replayed:,} passes replayed"
        most = f"longer than {self.lengths[-1]:,} places, or more than {self.counts[-1]} nodes at once"
        return counts + (f", {self.num_eager:,} eager ({most})" if self.num_eager else "")

    def new_cache(self, needed: int) -> Cache:
        """An empty cache of at least `needed` positions: the static one where it is large enough."""
        self._grown = -1
        # Padding is written after the nodes.
        if needed + self.counts[-1] > self.lengths[-1]:
            self._lent = None
            return Cache(1, needed)
        if self._cache is None:
            self._cache = Cache(1, self.lengths[-1])
        # A mask hides what an earlier request left, but not a NaN.
        self._cache.empty()
        for buffer in (self._outputs, *(inputs.states for inputs in self._roots.values())):
            if buffer is not None:
                buffer.zero_()
        self._lent = copy.copy(self._cache)
        return self._lent

    def in_place(self, name: str, value: Tensor) -> Tensor:
        """`value` at the address that it has in all requests."""
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

    def takes_root(self, cache: Cache, count: int) -> bool:
        """Whether a graph runs the `count` inputs that a cycle begins with. A whole prompt's are run eagerly."""
        self._grown = -1
        if not cache.length:
            return False
        return self._counted(cache is self._lent and count <= self.counts[-1])

    def takes_level(self, cache: Cache, first: int, count: int) -> bool:
        """Whether a graph runs `count` expansions, of which the first has number `first`."""
        fits = count <= self.counts[-1] and first + count <= MOST_EXPANSIONS
        return self._counted(cache is self._lent and self._grown == first and fits)

    def _counted(self, taken: bool) -> bool:
        self.num_replayed += taken
        self.num_eager += not taken
        return taken

    def begin(self, cache: Cache, output: Tensor, following: Tensor) -> None:
        """Take over the root's output [R,1,D] and its children's position [R,1] from an eager pass."""
        if cache is self._lent:
            self._make_outputs(output, following)
            assert self._outputs is not None and self._next is not None
            self._outputs[:, :1].copy_(output)
            self._next.copy_(following)
            self._grown = 0

    def root(
        self, key: Hashable, run: Run, score: Score, states: Tensor, tokens: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [V], the root's output [R,1,D] and its children's position [R,1]; the caller commits the inputs.

        Args:
            states: [R,N,J*D] true ones.
            tokens: [1,N] or [R,N].
            positions: [R,N] or [3,R,N].
        """
        assert self._lent is not None
        count, past = states.shape[1], self._lent.length
        inputs = self._roots.get(padded := self._padded(count))
        if inputs is None:
            inputs = self._roots[padded] = _RootInputs(padded, states, tokens, positions)
        inputs.fill(states, tokens, positions, past)
        length = self._length(past + padded)
        q = self.graphs.replay((key, "root", padded, length), lambda: self._run_root(inputs, length, run, score))
        self._grown = 0
        assert self._outputs is not None and self._next is not None
        # Out of the graphs' memory, which the next replay writes.
        return q.clone(), self._outputs[:, :1], self._next

    def level(
        self, key: Hashable, run: Run, score: Score, tokens: Tensor, above: Sequence[int], below: Sequence[int],
        seen: np.ndarray,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """q [F,V], and the outputs [R,1+S,D] of the root and all expansions of the cycle.

        Args:
            tokens: [F].
            above: the parents' expansions, -1 is the root.
            below: depths.
            seen: [F,S] bool: expansions that each one sees.
        """
        assert self._lent is not None
        count, past, first = len(above), self._lent.length, self._grown
        inputs = self._levels.get(padded := self._padded(count))
        if inputs is None:
            inputs = self._levels[padded] = _LevelInputs(padded, self.graphs.device)
        inputs.fill(tokens, above, below, seen, past, first)
        length = self._length(past + first + padded)
        q = self.graphs.replay((key, "level", padded, length), lambda: self._run_level(inputs, length, run, score))
        self._grown = first + count
        assert self._outputs is not None
        return q[:count].clone(), self._outputs[:, : 1 + self._grown]

    def _padded(self, count: int) -> int:
        return next(n for n in self.counts if n >= count)

    def _length(self, reach: int) -> int:
        return next(k for k in self.lengths if k >= reach)

    def _run_root(self, inputs: _RootInputs, length: int, run: Run, score: Score) -> Tensor:
        """Reads and writes static buffers only."""
        assert self._lent is not None and self._cache is not None
        new = inputs.past + torch.arange(inputs.count, device=inputs.past.device)
        mask = torch.arange(length, device=new.device) <= new[:, None]  # padding sees what stands before it
        with self._cache.written_at(new, length):
            hidden = run(inputs.states, inputs.tokens, inputs.positions, mask, torch.zeros_like(new))
        last, positions = hidden.index_select(1, inputs.last), inputs.positions
        following = (positions if positions.dim() == 2 else positions[0]).index_select(1, inputs.last) + 1
        self._make_outputs(last, following)
        assert self._outputs is not None and self._next is not None
        self._outputs[:, :1].copy_(last)
        self._next.copy_(following)
        return score(last)[0]

    def _run_level(self, inputs: _LevelInputs, length: int, run: Run, score: Score) -> Tensor:
        """Reads and writes static buffers only."""
        assert self._cache is not None and self._outputs is not None and self._next is not None
        device, rows = inputs.past.device, len(self._outputs)
        new = inputs.first + torch.arange(inputs.count, device=device)  # [F] numbers of the expansions
        behind = torch.arange(length, device=device) - inputs.past  # [K] place after the committed ones
        expansions = inputs.seen.index_select(1, behind.clamp(0, MOST_EXPANSIONS - 1)) & (behind < MOST_EXPANSIONS)
        mask = (behind < 0) | expansions
        states = self._outputs.index_select(1, inputs.above)
        with self._cache.written_at(inputs.past + new, length):
            hidden = run(states, inputs.tokens.expand(rows, -1), self._next + inputs.below - 1, mask, inputs.below)
        self._outputs.index_copy_(1, 1 + new, hidden)
        return score(hidden)

    def _make_outputs(self, output: Tensor, following: Tensor) -> None:
        if self._outputs is None:
            rows, _, width = output.shape
            self._outputs = output.new_zeros(rows, 1 + MOST_EXPANSIONS + self.counts[-1], width)
            self._next = torch.zeros_like(following)


class _RootInputs:
    """Static inputs of a pass over N true states."""

    def __init__(self, count: int, states: Tensor, tokens: Tensor, positions: Tensor):
        self.count = count
        self.states = states.new_zeros(len(states), count, states.shape[-1])
        self.tokens = tokens.new_zeros(len(tokens), count)
        self.positions = positions.new_zeros(*positions.shape[:-1], count)
        self._numbers = torch.zeros(2, dtype=torch.int64, device=states.device)
        self.past, self.last = self._numbers[:1], self._numbers[1:]  # committed places, index of the last true state

    def fill(self, states: Tensor, tokens: Tensor, positions: Tensor, past: int) -> None:
        """After the inputs stays what an earlier cycle left: nothing that counts sees it."""
        real = states.shape[1]
        self.states[:, :real].copy_(states)
        self.tokens[:, :real].copy_(tokens)
        self.positions[..., :real].copy_(positions)
        self._numbers.copy_(uploaded(torch.tensor([past, real - 1]), self._numbers.device))


class _LevelInputs:
    """Static inputs of a pass over F nodes, in one buffer, which one copy fills."""

    def __init__(self, count: int, device: torch.device):
        self.count = count
        words = 8 * (3 * count + 2)
        self._host = np.zeros(words + count * MOST_EXPANSIONS, dtype=np.uint8)
        self._buffer = torch.zeros(len(self._host), dtype=torch.uint8, device=device)
        self._numbers, self._seen = self._host[:words].view(np.int64), self._host[words:].view(bool)
        there: Any = self._buffer[:words].view(torch.int64)
        self.tokens, self.above, self.below, (self.past, self.first) = (
            there[:count], there[count : 2 * count], there[2 * count : 3 * count], (there[-2:-1], there[-1:])
        )  # fmt: skip
        self.seen = self._buffer[words:].view(torch.bool).view(count, MOST_EXPANSIONS)

    def fill(
        self, tokens: Tensor, above: Sequence[int], below: Sequence[int], seen: np.ndarray, past: int, first: int
    ) -> None:
        """Padding is children of the root that see nothing but themselves."""
        real, count, on_host = len(above), self.count, tokens.device.type == "cpu"
        numbers = self._numbers[: 3 * count].reshape(3, count)
        numbers[:2], numbers[2] = 0, 1
        if on_host:
            numbers[0, :real] = tokens.numpy()
        numbers[1, :real] = np.array(above) + 1
        numbers[2, :real] = below
        self._numbers[-2:] = past, first
        mask = self._seen.reshape(count, MOST_EXPANSIONS)
        mask[:] = False
        padding = np.arange(real, count)
        mask[padding, np.minimum(first + padding, MOST_EXPANSIONS - 1)] = True
        mask[:real, : seen.shape[1]] = seen
        self._buffer.copy_(uploaded(torch.from_numpy(self._host.copy()), self._buffer.device))
        if not on_host:
            self.tokens[:real].copy_(tokens)
