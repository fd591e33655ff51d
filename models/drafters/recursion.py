"""Tree expansion of every head that reads its own last output: the nodes run after the committed positions of the
cache.

Letters: R rows, N positions, D width, F nodes, V vocabulary, K places seen, S expansions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..decoding.cache import Cache
from ..decoding.expansions import Expansions
from ..decoding.upload import upload_tokens


class Recursive:
    """The part of a proposal that grows. `_stand` is called in each cycle, when the true states have been read."""

    _cache: Cache
    _emitted: int  # tokens of the answer that are committed
    _next: Tensor  # [R,1] position of the root's children
    _expansions: Expansions
    _outputs: Tensor  # [R,1+S,D] the root's, then each expansion's

    def _run(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, depths: Tensor) -> Tensor:
        """[R,N,D] outputs for N states and the tokens after them; `depths` [N] int64, 0 is a true state."""
        raise NotImplementedError

    def _probabilities(self, hidden: Tensor, steps: Sequence[int]) -> Tensor:
        """q [N,V] of outputs; output n scores token number `steps[n]` of the answer (from 0)."""
        raise NotImplementedError

    def _stand(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Keep N read positions [R,N] in the cache, whose last output is the root's; q [V] after it."""
        self._cache.advance(hidden.shape[1])
        self._next = positions[:, -1:] + 1
        self._expansions, self._outputs = Expansions(), hidden[:, -1:]
        return self._probabilities(self._outputs, [self._emitted])[0]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Run nodes [F] on their parents' outputs; the cache keeps its committed length."""
        past, first, device = self._cache.length, len(self._expansions), self._outputs.device
        depths = self._expansions.take(parents)
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
