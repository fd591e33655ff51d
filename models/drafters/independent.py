"""Drafting with a model of its own: a draft LVLM that sees the pictures (M) or reads text only (T).

TABED, section 3: M is the draft on the whole prompt; in T each picture's run of ids becomes one
newline. Letters: N tokens, F nodes, V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...core.nouns import IMAGE, Request
from ..decoding.cache import Cache
from ..decoding.decoder import CachedDecoder
from ..decoding.tree import ROOT
from ..decoding.warp import Warp
from ..targets.base import Taps, TargetStep

Mode = Literal["M", "T"]


class IndependentProposal:
    """Proposes with a causal model through its own cache.

    Args:
        newline_id: stands for a picture in mode T.
    """

    taps = Taps()
    max_levels = None

    def __init__(self, decoder: CachedDecoder, mode: Mode, *, newline_id: int):
        self.decoder, self.mode, self.newline_id = decoder, mode, newline_id
        self._cache: Cache | None = None

    @torch.inference_mode()
    def start(self, request: Request, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        request = self.view(request).to(self.decoder.device)
        length = len(request.ids)
        self._warp = warp
        self._cache = self.decoder.new_cache(length + capacity)
        embeds = self.decoder.embed(request.ids[None], request.modality[None], request.pixels)
        self.decoder.forward(embeds, self._cache, torch.arange(length, device=self.decoder.device)[None])
        self._cache.advance(length)
        self._forget_slots()

    def view(self, request: Request) -> Request:
        """The request as this mode sees it."""
        return request if self.mode == "M" else without_pictures(request, self.newline_id)

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
        self._forget_slots()
        return self._warp.heat(self.decoder.logits(states.feature[0, -1]))

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        assert self._cache is not None
        past, first, device = self._cache.length, len(self._parents), self.decoder.device
        self._parents += parents
        self._depths += [1 if p == ROOT else self._depths[p] + 1 for p in parents]
        positions = torch.tensor([[past + depth - 1 for depth in self._depths[first:]]], device=device)
        follows = len(parents) == 1 and parents[0] == first - 1 and self._depths[-1] == first + 1
        mask = None if follows else self._ancestors(first).to(device)
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
        self._forget_slots()

    def _forget_slots(self) -> None:
        self._parents: list[int] = []
        self._depths: list[int] = []

    def _ancestors(self, first: int) -> Tensor:
        """[F,S] bool: which slots each of the slots from `first` on sees (itself and its ancestors)."""
        mask = torch.zeros(len(self._parents) - first, len(self._parents), dtype=torch.bool)
        for row, slot in enumerate(range(first, len(self._parents))):
            while slot != ROOT:
                mask[row, slot] = True
                slot = self._parents[slot]
        return mask


def without_pictures(request: Request, newline_id: int) -> Request:
    """Mode T: each picture's run of ids becomes one newline, and the pixels go."""
    if request.pixels is None:
        return request
    run = len(request.ids[request.modality == IMAGE]) // len(request.pixels)
    ids: list[int] = []
    position = 0
    values, modality = request.ids.tolist(), request.modality.tolist()
    while position < len(values):
        if modality[position] == IMAGE:
            # Every picture has as many tokens, so two adjacent ones are two runs.
            ids.append(newline_id)
            position += run
        else:
            ids.append(values[position])
            position += 1
    kept = torch.tensor(ids)
    return Request(kept, torch.zeros(len(kept), dtype=torch.int8), None, request.name)
