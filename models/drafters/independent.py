"""Drafting with a model of its own: a draft LVLM that sees the pictures (M, P) or reads text only (T).

TABED, section 3: M is the draft on the whole prompt; in P pictures are pooled 2 x 2 before the projector
and take a quarter of the tokens; in T each picture's run of ids becomes one newline.
Letters: N tokens, F nodes, V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...core.nouns import IMAGE, Request
from ..decoding.cache import Cache
from ..decoding.decoder import CachedDecoder
from ..decoding.slots import Slots
from ..decoding.warp import Warp
from ..targets.base import Taps, TargetStep

Mode = Literal["M", "P", "T"]
_POOL = {"M": 1, "P": 2, "T": 1}


class IndependentProposal:
    """Proposes with a causal model through its own cache.

    Args:
        newline_id: stands for a picture in mode T.
    """

    taps = Taps()
    max_levels: int | None = None

    def __init__(self, decoder: CachedDecoder, mode: Mode, *, newline_id: int):
        self.decoder, self.mode, self.newline_id = decoder, mode, newline_id
        self._cache: Cache | None = None

    @torch.inference_mode()
    def start(self, request: Request, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        request = self.view(request).to(self.decoder.device)
        length = len(request.ids)
        self._warp = warp
        self._cache = self._new_cache(length + capacity)
        embeds = self.decoder.embed(request.ids[None], request.modality[None], request.pixels, pool=_POOL[self.mode])
        self.decoder.forward(embeds, self._cache, torch.arange(length, device=self.decoder.device)[None])
        self._cache.advance(length)
        self._slots = Slots()

    def _new_cache(self, capacity: int) -> Cache:
        return self.decoder.new_cache(capacity)

    def view(self, request: Request) -> Request:
        """The request as this mode sees it."""
        if self.mode == "T":
            return without_pictures(request, self.newline_id)
        return with_shorter_pictures(request, _POOL[self.mode])

    def last_position(self, request: Request, max_new_tokens: int) -> int:
        """How far the positions go; past those that the draft has it proposes noise (TABED: M on five pictures)."""
        return len(self.view(request).ids) + max_new_tokens

    def begin(self, first: int) -> None:
        self._pending = [first]

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Feed what was committed since the last cycle; the cache then ends at the last committed token."""
        assert self._cache is not None
        ids = torch.tensor([self._pending], device=self.decoder.device)
        past = self._cache.length
        positions = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
        states = self.decoder.forward(self.decoder.embed(ids), self._cache, positions)
        self._cache.advance(ids.shape[1])
        self._slots = Slots()
        return self._warp.heat(self.decoder.logits(states.feature[0, -1]))

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        assert self._cache is not None
        past, first, device = self._cache.length, len(self._slots), self.decoder.device
        depths = self._slots.take(parents)
        positions = torch.tensor([[past + depth - 1 for depth in depths]], device=device)
        mask = None if self._slots.extends_chain(len(parents)) else self._slots.ancestors(first).to(device)
        # Slots are written behind each other: the cache's length stands at them only while they run.
        self._cache.crop_to(past + first)
        states = self.decoder.forward(self.decoder.embed(tokens[None].to(device)), self._cache, positions, mask)
        self._cache.crop_to(past)
        return self._warp.heat(self.decoder.logits(states.feature[0]))

    def accept(self, verified: Any) -> None:
        assert self._cache is not None
        kept = []
        for node in verified.path:
            slot = verified.tree.slots[node]
            if slot == -1:
                break
            kept.append(slot)
        self._cache.commit(kept)
        self._pending = [*verified.tokens[len(kept) :], verified.bonus]
        self._slots = Slots()


def without_pictures(request: Request, newline_id: int) -> Request:
    """Mode T: each picture's run of ids becomes one newline, and the pixels go."""
    if request.pixels is None:
        return request
    # Every picture has as many tokens, so two adjacent ones are two runs: the first of each becomes the newline.
    kept = _thinned(request, _run(request))
    ids = request.ids[kept].masked_fill(request.modality[kept] == IMAGE, newline_id)
    return Request(ids, torch.zeros(len(ids), dtype=torch.int8), None, request.name)


def with_shorter_pictures(request: Request, pool: int) -> Request:
    """Mode P: each picture's run keeps one id in `pool` x `pool`; the pixels stay."""
    if request.pixels is None or pool == 1:
        return request
    kept = _thinned(request, pool * pool)
    return Request(request.ids[kept], request.modality[kept], request.pixels, request.name)


def _run(request: Request) -> int:
    assert request.pixels is not None
    return int((request.modality == IMAGE).sum()) // len(request.pixels)


def _thinned(request: Request, every: int) -> Tensor:
    """[T] bool: all text, and one image token of each `every` (runs are multiples of it)."""
    image = request.modality == IMAGE
    count = image.cumsum(0) - 1
    return ~image | (count % every == 0)
