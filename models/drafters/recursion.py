"""Tree expansion of every head that reads its own last output: the nodes run after the committed positions of the
cache.

Letters: R rows, N positions, D width, F nodes, V vocabulary, K places seen, S expansions, J joined states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..decoding.cache import Cache
from ..decoding.head_layer import Rotary, Rotation, rotation
from ..decoding.tree import Expansions, upload_tokens
from ..decoding.warp import Warp
from ..fast.cuda_graphs import Graphs


class Recursive:
    """The part of a proposal that runs in each cycle: what was committed, then the tree that grows after it."""

    graphs: Graphs | None = None  # of its passes; None: they are run eagerly
    captures = True  # whether a pass reads nothing of a request but its arguments and the cache

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

    def _pass(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, depths: Tensor) -> Tensor:
        """`_run` of fused states, by a CUDA graph where there is one; `mask` is over all places."""
        if self.graphs is None or not self.graphs.take(self._cache, states.shape[1]):
            return self._run(states, tokens, positions, mask, depths)

        def run(seen: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            states, tokens, positions, depths = inputs
            return (self._run(states, tokens, positions, seen[0], depths),)

        inputs = (states, 1), (tokens, 1), (positions, -1), (depths, 0)
        (hidden,) = self.graphs(positions.dim(), run, self._cache, mask, *inputs)
        return hidden

    def _lay_out(self, rotary: Rotary, positions: Tensor, further: int) -> None:
        """Make rotations up to `further` behind the last of a request's `positions`. A graph computes its own: it would
        read a shorter request's table.
        """
        if self.graphs is not None:
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
        self._expansions = Expansions()
        # Text has one position, whatever the number of coordinates.
        positions = self._positions if self._positions.dim() == 2 else self._positions[0]
        self._next = positions[:, -1:] + 1
        mask = None  # one input sees all
        if count > 1:
            mask = torch.ones(count, past + count, dtype=torch.bool, device=device).tril_(past)
        true = torch.zeros(count, dtype=torch.int64, device=device)
        hidden = self._pass(self._fused(self._states), self._tokens, self._positions, mask, true)
        self._cache.advance(count)
        self._outputs = hidden[:, -1:]
        return self._probabilities(self._outputs, [self._emitted])[0]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Run nodes [F] on their parents' outputs; the cache keeps its committed length."""
        past, first, device = self._cache.length, len(self._expansions), self._outputs.device
        depths = self._expansions.take(parents)
        # The root's output, whose parent is ROOT, -1, stands before the expansions'.
        rows, seen = np.array([parents, depths, depths]), self._expansions.ancestors(first, past=past).numpy()
        rows[0] += 1
        rows[2] -= 1  # behind the root's children
        tokens, (above, below, further), mask = upload_tokens(device, tokens, rows, seen)
        states, positions = self._outputs[:, above], self._next + further
        # Expansions are written after each other; the cache's length covers them only during this forward.
        self._cache.crop_to(past + first)
        hidden = self._pass(states, tokens.expand(len(states), -1), positions, mask, below)
        self._cache.crop_to(past)
        q = self._probabilities(hidden, [self._emitted + depth for depth in depths])
        self._outputs = torch.cat([self._outputs, hidden], dim=1)
        return q
