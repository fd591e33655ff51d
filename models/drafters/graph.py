"""The draft chain as one CUDA graph: at 68M parameters a draft step is mostly the host's time.

The graph holds every forward of a cycle's chain, from the tokens committed last to the last drafted
one; the host waits once a cycle, in the acceptance rule. What is captured is an ordinary function over
buffers that stay in place, which runs without a graph too (on a CPU it always does): that is how it is
tested against `IndependentProposal`. Letters: N new tokens, L capacity, G levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.nouns import Request
from ..decoding.cache import Cache
from ..decoding.decoder import CachedDecoder
from ..decoding.slots import Slots
from ..decoding.tree import ROOT
from ..decoding.warp import Warp
from ..targets.base import TargetStep
from .independent import IndependentProposal, Mode


class GraphedChain(IndependentProposal):
    """Proposes the likeliest chain of `gamma` tokens; for the chain policy with `draw: top-k`, and nothing else.

    Args:
        capacity: positions that a request may take, prompt included; the graph reads all of them.
    """

    def __init__(self, decoder: CachedDecoder, mode: Mode, *, newline_id: int, gamma: int, capacity: int):
        super().__init__(decoder, mode, newline_id=newline_id)
        self.gamma, self.capacity, self.max_levels = gamma, capacity, gamma
        self._static: Cache | None = None
        self._graphs: dict[tuple[int, Warp], torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def start(self, request: Request, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        needed = len(self.view(request).ids) + capacity
        assert needed <= self.capacity, f"{needed} positions asked of a graph for {self.capacity}"
        if self._static is None:
            # The buffers stay where they are for every request: a graph remembers addresses.
            self._static = self.decoder.new_cache(self.capacity)
            device = self.decoder.device
            self._ids = torch.zeros(2, dtype=torch.int64, device=device)
            self._length = torch.zeros((), dtype=torch.int64, device=device)
            self._probs = torch.zeros(self.gamma, self.decoder.vocab_size, device=device)
        self._static.crop_to(0)
        super().start(request, prefill, warp, capacity=capacity)

    def _new_cache(self, capacity: int) -> Cache:
        assert self._static is not None
        return self._static

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Run the whole chain; `expand` only hands out what it found."""
        assert self._cache is not None
        count = len(self._pending)
        self._ids[:count] = torch.tensor(self._pending)
        self._length.fill_(self._cache.length)
        if self.decoder.device.type == "cuda":
            self._replay(count)
        else:
            self._chain(count)
        self._cache.advance(count)
        self._slots = Slots()
        return self._probs[0]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """q [1,V] of the next level. `tokens` is the likeliest one of the level before, which the chain has run."""
        first = len(self._slots)
        assert list(parents) == [first - 1 if first else ROOT], "a captured chain cannot branch"
        self._slots.take(parents)
        return self._probs[first + 1 : first + 2]

    def _replay(self, count: int) -> None:
        key = (count, self._warp)
        if key not in self._graphs:
            for _ in range(2):  # libraries choose their kernels before the capture
                self._chain(count)
            torch.cuda.synchronize()
            self._graphs[key] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._chain(count)
        self._graphs[key].replay()

    def _chain(self, count: int) -> None:
        """Feed the `count` committed tokens, then each likeliest token; reads and writes buffers only."""
        assert self._static is not None
        ids, offset = self._ids[:count], torch.arange(count, device=self._ids.device)
        positions = self._length + offset
        for level in range(self.gamma):
            feature = self._step(ids, positions)
            probs = self._warp.heat(self.decoder.logits(feature[0, -1]))
            self._probs[level].copy_(probs)
            ids, positions = probs.argmax(-1, keepdim=True), positions[-1:] + 1

    def _step(self, ids: Tensor, positions: Tensor) -> Tensor:
        assert self._static is not None
        places = torch.arange(self.capacity, device=ids.device)
        mask = (places <= positions[:, None])[None, None]  # [1,1,N,L]: what lies behind is stale and unseen
        with self._static.written_at(positions):
            return self.decoder.language_model(
                inputs_embeds=self.decoder.embed(ids[None]),
                attention_mask=mask,
                position_ids=positions[None],
                past_key_values=self._static,
                use_cache=True,
            ).last_hidden_state
