"""A frozen model of language, with pictures or without, as a target: our positions, masks and cache.

Letters: R rows, T places, N nodes without the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...core.errors import UserError
from ...core.nouns import Request
from ...core.pictures import TEXT
from ...core.states import Taps
from ..decoding.cache import Cache
from ..decoding.decoder import CachedDecoder
from ..decoding.rows import Guidance
from ..decoding.tree import Tree
from .base import Prompt, TargetStep
from .reading import ReadsStates


@dataclass
class LanguageSession:
    cache: Cache
    taps: Taps
    # How far positions run before places: M-RoPE's delta, which the prompt fixes for all that is decoded behind it.
    ahead: int = 0


class LanguageTarget(ReadsStates):
    """Any decoder over one row.

    Args:
        prefill_chunk: places of a prompt that are run at once; None: all.
    """

    def __init__(self, decoder: CachedDecoder, *, prefill_chunk: int | None = None):
        decoder.model.requires_grad_(False)
        self.decoder, self.prefill_chunk = decoder, prefill_chunk
        self.vocab_size = decoder.vocab_size

    def view(self, request: Request) -> Request:
        """The request as the target reads it. Raises `UserError` where its pictures are not cut for it."""
        if request.pixels is not None and not self.decoder.reads_images:
            raise UserError(
                "the request has pictures and the target is a model of text alone",
                where=request.name,
                cure="use records without pictures, or a target that sees",
            )
        return request

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @torch.inference_mode()
    def prefill(self, request: Request, taps: Taps, *, capacity: int) -> tuple[LanguageSession, TargetStep]:
        """Run the prompt. `capacity` is the number of tokens that may follow it, drafted ones included."""
        request = self.view(request).to(self.device)
        length, ids, modality = len(request.ids), request.ids[None], request.modality[None]
        prompts = self.decoder.prompts(ids, modality, request.pixels, request.pictures)
        session = LanguageSession(self.decoder.new_cache(length + capacity), taps, prompts.ahead)
        states = self.decoder.run(
            prompts,
            session.cache,
            layers=taps.layers,
            attention=taps.prefill_attention,
            queries=_queries(modality[0], taps.attention_queries) if taps.prefill_attention else None,
            chunk=self.prefill_chunk,
        )
        positions = prompts.positions if len(prompts.positions) == 3 else prompts.positions[0]
        seen = torch.ones_like(ids, dtype=torch.bool)
        return session, TargetStep(
            self.decoder.logits(states.feature[0, -1:]),
            states.feature if taps.feature else None,
            states.layers,
            states.attention,
            Prompt(ids, seen, positions, Guidance(), modality),
        )

    @torch.inference_mode()
    def verify(self, session: LanguageSession, root: int, tree: Tree) -> TargetStep:
        device, past = self.device, session.cache.length
        ids = torch.cat([torch.tensor([root], device=device), tree.tokens.to(device)])
        states = self.decoder.forward(
            self.decoder.embed(ids[None]),
            session.cache,
            self._positions(past + session.ahead, tree)[None],
            None if tree.is_chain else tree.ancestor_mask(device),
            layers=session.taps.layers,
        )
        feature = states.feature if session.taps.feature else None
        return TargetStep(self.decoder.logits(states.feature[0]), feature, states.layers)

    @torch.inference_mode()
    def commit(self, session: LanguageSession, path: Sequence[int]) -> None:
        session.cache.commit([0, *(node + 1 for node in path)])

    def _positions(self, root: int, tree: Tree) -> Tensor:
        """[N+1]: a node stands where its depth puts it, whatever its place in the pass, alike in all coordinates."""
        if tree.is_chain:
            return torch.arange(root, root + tree.num_nodes + 1, device=self.device)
        return torch.tensor([root, *(root + depth for depth in tree.depths)], device=self.device)


def _queries(modality: Tensor, which: Literal["suffix", "text", "last"]) -> Tensor:
    """[T] bool: the places whose attention is averaged."""
    visual, places = modality != TEXT, torch.arange(len(modality), device=modality.device)
    if which == "text":
        return ~visual
    first = len(modality) - 1 if which == "last" else (int(visual.nonzero()[-1]) + 1 if visual.any() else 0)
    return places >= first
