"""The draft chain as one CUDA graph: at 68M parameters a draft step is mostly the host's time.

The graph holds every forward of a cycle's chain, from the tokens committed last to the last drafted
one, for one mode or for all of an ensemble; the host waits once a cycle, in the acceptance rule.
Letters: R rows, N new tokens, L capacity, G levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..decoding.cache import Cache
from ..decoding.captured import Graphs
from ..decoding.decoder import CachedDecoder
from ..decoding.expansions import Expansions
from ..decoding.rows import fill, stacked
from ..decoding.tree import ROOT
from ..decoding.upload import upload
from .ensemble import EnsembleProposal
from .modes import ImageSubstitutes, Mode, View
from .weights import Weights, mixture


class GraphedChain(EnsembleProposal):
    """Proposes the likeliest chain of `gamma` tokens; for the chain policy with `draw: top-k`, and nothing else.

    Args:
        capacity: positions that a request may take, prompt included; the graph reads all of them. A longer one
            starts with larger buffers and new graphs.
    """

    def __init__(
        self,
        decoder: CachedDecoder,
        members: Sequence[Mode],
        weights: Weights,
        *,
        newline_id: int,
        gamma: int,
        capacity: int,
        substitutes: ImageSubstitutes | None = None,
        record: bool = False,
    ):
        super().__init__(decoder, members, weights, newline_id=newline_id, substitutes=substitutes, record=record)
        self.gamma, self.capacity, self.max_levels = gamma, capacity, gamma
        self._static: Cache | None = None
        self.graphs = Graphs(decoder.device)

    def _prefill(self, views: Sequence[View], capacity: int) -> None:
        caches = self._run_prompts(views)
        assert not any(self._rope_delta), "the graph counts positions as places"
        lengths = [cache.length for cache in caches]
        needed = max(lengths) + capacity
        if needed > self.capacity:  # captions may make a prompt longer than its pictures did
            self.capacity, self._static = needed + needed // 4, None
            self.graphs.clear()
        if self._static is None:
            # The buffers stay where they are for every request: a graph remembers addresses.
            self._static = stacked(caches, self.capacity)
        else:
            fill(self._static, caches)
        self._cache = self._static
        before = np.array([[max(lengths) - n] for n in lengths])
        (self._padding,) = upload(self.decoder.device, before)  # [R,1] places before a row's prompt

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Run the whole chain; `expand` only returns its results."""
        assert self._cache is not None
        pending = np.array(self._pending), np.array([self._cache.length])
        ids, length = upload(self.decoder.device, *pending)
        each, self._probs = self.graphs(self._warp, self._chain, ids, length, self._padding, self.weights.current)
        self._cache.advance(len(self._pending))
        self._expansions = Expansions()
        self._drafted = list(each)
        return self._probs[0]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """q [1,V] of the next level. `tokens` is the likeliest one of the level before, which the chain has run."""
        first = len(self._expansions)
        assert list(parents) == [first - 1 if first else ROOT], "a captured chain cannot branch"
        self._expansions.take(parents)
        return self._probs[first + 1 : first + 2]

    def _chain(self, ids: Tensor, length: Tensor, padding: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """[G,R,1,V] of each mode and [G,V] mixed: feed the committed `ids` [N] after `length` [1] places, then each
        likeliest token.
        """
        places, each, probs = length + torch.arange(len(ids), device=ids.device), [], []
        for _ in range(self.gamma):
            hidden = self._step(ids, places, padding)[:, -1:]
            each.append(self._warp.apply_temperature(self.decoder.logits(hidden)))  # [R,1,V]
            probs.append(mixture(weights, each[-1])[0])
            ids, places = probs[-1].argmax(-1, keepdim=True), places[-1:] + 1
        return torch.stack(each), torch.stack(probs)

    def _step(self, ids: Tensor, places: Tensor, padding: Tensor) -> Tensor:
        """[R,N,D] of tokens [N] at `places` [N] of every row."""
        assert self._static is not None
        every = torch.arange(self.capacity, device=ids.device)
        # [R,1,N,L]: what lies after is stale and unseen, and so is the padding.
        mask = ((every <= places[:, None]) & (every >= padding)[:, None])[:, None]
        with self._static.written_at(places):
            return self.decoder.language_model(
                inputs_embeds=self.decoder.embed(ids[None]).expand(len(mask), -1, -1),
                attention_mask=mask,
                position_ids=places - padding,
                past_key_values=self._static,
                use_cache=True,
            ).last_hidden_state
