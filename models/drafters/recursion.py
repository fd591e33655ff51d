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
from ..decoding.expansions import Expansions
from ..decoding.upload import upload_tokens
from ..decoding.warp import Warp
from .head_graphs import HeadGraphs


class Recursive:
    """The part of a proposal that runs in each cycle: what was committed, then the tree that grows after it."""

    graphs: HeadGraphs | None = None  # of its passes; None: they are run eagerly

    _cache: Cache
    _warp: Warp
    _emitted: int  # tokens of the answer that are committed
    _states: Tensor  # [R,N,J*D] true ones of what was committed last
    _tokens: Tensor  # [R,N] the token after each of them, or [1,N] for all rows
    _positions: Tensor  # [R,N], or [3,R,N] of a prompt's end under M-RoPE
    _next: Tensor  # [R,1] position of the root's children
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

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Read what was committed; only that stays in the cache. q [V] of the token after it."""
        count, past, device = self._states.shape[1], self._cache.length, self._states.device
        self._expansions = Expansions()
        if self.graphs is not None and self.graphs.takes_root(self._cache, count):
            q, self._outputs, self._next = self.graphs.root(
                self._warp, self._run_true, self._scored, self._states, self._tokens, self._positions
            )
            self._cache.advance(count)
            return q
        mask = None  # one input sees all
        if count > 1:
            mask = torch.ones(count, past + count, dtype=torch.bool, device=device).tril_(past)
        true = torch.zeros(count, dtype=torch.int64, device=device)
        hidden = self._run_true(self._states, self._tokens, self._positions, mask, true)
        self._cache.advance(count)
        # Text has one position, whatever the number of coordinates.
        positions = self._positions if self._positions.dim() == 2 else self._positions[0]
        self._outputs, self._next = hidden[:, -1:], positions[:, -1:] + 1
        if self.graphs is not None:
            self.graphs.begin(self._cache, self._outputs, self._next)
        return self._probabilities(self._outputs, [self._emitted])[0]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Run nodes [F] on their parents' outputs; the cache keeps its committed length."""
        past, first, device = self._cache.length, len(self._expansions), self._outputs.device
        depths = self._expansions.take(parents)
        if self.graphs is not None and self.graphs.takes_level(self._cache, first, len(parents)):
            seen = self._expansions.ancestors(first).numpy()
            q, self._outputs = self.graphs.level(self._warp, self._run, self._scored, tokens, parents, depths, seen)
            return q
        # The root's output, whose parent is ROOT, -1, stands before the expansions'.
        rows, mask = np.array([parents, depths]), self._expansions.ancestors(first, past=past)
        rows[0] += 1
        tokens, (above, below), mask = upload_tokens(device, tokens, rows, mask.numpy())
        positions = self._next + below - 1
        # Expansions are written after each other; the cache's length covers them only during this forward.
        self._cache.crop_to(past + first)
        hidden = self._run(self._outputs[:, above], tokens.expand(len(self._outputs), -1), positions, mask, below)
        self._cache.crop_to(past)
        self._outputs = torch.cat([self._outputs, hidden], dim=1)
        return self._probabilities(hidden, [self._emitted + depth for depth in depths])

    def _run_true(
        self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, depths: Tensor
    ) -> Tensor:
        return self._run(self._fused(states), tokens, positions, mask, depths)

    def _scored(self, hidden: Tensor) -> Tensor:
        """q [N,V] of outputs [R,N,D] in a graph, which is of no step of the answer (see `why_not`)."""
        return self._probabilities(hidden, [0] * hidden.shape[1])
