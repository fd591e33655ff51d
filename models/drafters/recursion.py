"""Tree expansion of every head that reads its own last output: the nodes run after the committed positions of the
cache.

Letters: R rows, N positions, D width, F nodes, V vocabulary, K places seen, S expansions, J joined states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..decoding.cache import Cache
from ..decoding.captured import PassGraphs
from ..decoding.expansions import Expansions
from ..decoding.head_layer import Rotary, Rotation, rotation
from ..decoding.upload import upload, upload_tokens
from ..decoding.warp import Warp


class Recursive:
    """The part of a proposal that runs in each cycle: what was committed, then the tree that grows after it."""

    graphs: PassGraphs | None = None  # of its passes; None: they are run eagerly

    _cache: Cache
    _warp: Warp
    _emitted: int  # tokens of the answer that are committed
    _states: Tensor  # [R,N,J*D] true ones of what was committed last
    _tokens: Tensor  # [R,N] the token after each of them, or [1,N] for all rows
    _positions: Tensor  # [R,N], or [3,R,N] of a prompt's end under M-RoPE
    _next: Tensor  # [R,1] position of the root's children
    _rotations: Tensor | None = None  # of the head's `Rotary.table`; None: they are computed in each pass
    _expansions: Expansions
    _outputs: Tensor  # [R,1+S,D] the root's, then each expansion's

    def _fused(self, states: Tensor) -> Tensor:
        """True states [R,N,J*D] -> what the layer reads of them [R,N,D]."""
        raise NotImplementedError

    def _run(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, depths: Tensor) -> Tensor:
        """[R,N,D] outputs for N states and the tokens after them; `depths` [N] int64, 0 is a true state."""
        raise NotImplementedError

    def _probabilities(self, hidden: Tensor, steps: Sequence[int]) -> Tensor:
        """q [N,V] of outputs; output n scores token number `steps[n]` of the answer (from 0)."""
        raise NotImplementedError

    def _new_cache(self, needed: int) -> Cache:
        """An empty cache of at least `needed` positions."""
        return Cache(1, needed) if self.graphs is None else self.graphs.new_cache(needed)

    def _in_place(self, name: str, value: Tensor) -> Tensor:
        """`value`, which `_run` reads in all passes of a request; graphs find it at one address for all requests."""
        return value if self.graphs is None else self.graphs.in_place(name, value)

    def _lay_out(self, rotary: Rotary, positions: Tensor, further: int) -> None:
        """Make rotations up to `further` behind the last of a request's `positions`. A graph computes its own: it would
        read a shorter request's table.
        """
        if self.graphs is not None and self.graphs.failure is None:
            self._rotations = None
            return
        reach = int(positions.max()) + further + 1
        if self._rotations is None or len(self._rotations) < reach:
            self._rotations = rotary.table(max(256, 1 << (reach - 1).bit_length()), positions.device)

    def _turned(self, positions: Tensor) -> Tensor | Rotation:
        """Positions as the head's forward reads them: [R,N] as their rotation where there is a table."""
        if self._rotations is None or positions.dim() == 3:
            return positions
        return rotation(self._rotations, positions)

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Read what was committed; only that stays in the cache. q [V] of the token after it."""
        count, past, device = self._states.shape[1], self._cache.length, self._states.device
        self._expansions, fit = Expansions(), None
        if self.graphs is not None and past:  # a whole prompt is run eagerly
            fit = self.graphs.fit(self._cache, count)
        # Text has one position, whatever the number of coordinates.
        positions = self._positions if self._positions.dim() == 2 else self._positions[0]
        self._next = positions[:, -1:] + 1
        if fit is not None and self.graphs is not None:
            more, places = fit[0] - count, np.arange(past, past + fit[0])
            states, tokens = F.pad(self._states, (0, 0, 0, more)), F.pad(self._tokens, (0, more))
            positions = F.pad(self._positions, (0, more))
            self._outputs, q = self.graphs.run(
                ("root", self._warp, fit[1]), partial(self._captured_root, fit[1]), states, tokens, positions,
                *upload(device, places, np.array([count - 1])),
            )  # fmt: skip
            self._cache.advance(count)
            return q[0]
        mask = None  # one input sees all
        if count > 1:
            mask = torch.ones(count, past + count, dtype=torch.bool, device=device).tril_(past)
        true = torch.zeros(count, dtype=torch.int64, device=device)
        hidden = self._run(self._fused(self._states), self._tokens, self._positions, mask, true)
        self._cache.advance(count)
        self._outputs = hidden[:, -1:]
        return self._probabilities(self._outputs, [self._emitted])[0]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Run nodes [F] on their parents' outputs; the cache keeps its committed length."""
        past, first, count, device = self._cache.length, len(self._expansions), len(parents), self._outputs.device
        depths = self._expansions.take(parents)
        # The root's output, whose parent is ROOT, -1, stands before the expansions'.
        rows, seen = np.array([parents, depths, depths]), self._expansions.ancestors(first, past=past).numpy()
        rows[0] += 1
        rows[2] -= 1  # behind the root's children
        fit = None if self.graphs is None else self.graphs.fit(self._cache, count, first)
        if fit is not None:
            # Padding is children of the root that see what is committed: an empty row of attention is undefined.
            rows, seen, tokens = _padded(rows, 3, fit[0]), _padded(seen, *fit), F.pad(tokens, (0, fit[0] - count))
            seen[count:, :past] = True
            rows = np.vstack([rows, np.arange(past + first, past + first + fit[0])])
        tokens, (above, below, further, *places), mask = upload_tokens(device, tokens, rows, seen)
        states, positions = self._outputs[:, above], self._next + further
        tokens = tokens.expand(len(states), -1)
        if fit is not None and self.graphs is not None:
            hidden, q = self.graphs.run(
                ("level", self._warp), self._captured_level, states, tokens, positions, mask, below, *places
            )
            hidden, q = hidden[:, :count], q[:count]
        else:
            # Expansions are written after each other; the cache's length covers them only during this forward.
            self._cache.crop_to(past + first)
            hidden = self._run(states, tokens, positions, mask, below)
            self._cache.crop_to(past)
            q = self._probabilities(hidden, [self._emitted + depth for depth in depths])
        self._outputs = torch.cat([self._outputs, hidden], dim=1)
        return q

    def _captured_root(
        self, reach: int, states: Tensor, tokens: Tensor, positions: Tensor, places: Tensor, last: Tensor
    ) -> tuple[Tensor, ...]:
        """Output [R,1,D] and q [1,V] of the true state with index `last` [1]; padding after it sees what it sees."""
        mask = torch.arange(reach, device=places.device) <= places[:, None]
        with self._cache.written_at(places, reach):
            hidden = self._run(self._fused(states), tokens, positions, mask, torch.zeros_like(places))
        output = hidden.index_select(1, last)
        return output, self._scored(output)

    def _captured_level(
        self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, depths: Tensor, places: Tensor
    ) -> tuple[Tensor, ...]:
        """Outputs [R,N,D] and q [N,V] of nodes that are written at `places` [N]."""
        with self._cache.written_at(places, mask.shape[-1]):
            hidden = self._run(states, tokens, positions, mask, depths)
        return hidden, self._scored(hidden)

    def _scored(self, hidden: Tensor) -> Tensor:
        """q [N,V] of outputs [R,N,D] in a graph, which is of no step of the answer (see `why_not`)."""
        return self._probabilities(hidden, [0] * hidden.shape[1])


def _padded(array: np.ndarray, *shape: int) -> np.ndarray:
    """The array in the corner of zeros of this shape."""
    result = np.zeros(shape, dtype=array.dtype)
    result[tuple(slice(size) for size in array.shape)] = array
    return result
