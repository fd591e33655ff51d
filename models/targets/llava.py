"""LLaVA-1.5, NeXT and OneVision as targets: transformers' weights and modules, our positions, masks and cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ...core.nouns import IMAGE, Request
from ..decoding.cache import Cache
from ..decoding.decoder import CachedDecoder
from ..decoding.rows import Guidance
from ..decoding.tree import Tree
from ..pictures import flat_view, pictures_of
from .base import Prompt, Taps, TargetStep
from .reading import ReadsStates


@dataclass
class LlavaSession:
    cache: Cache
    taps: Taps


class LlavaTarget(ReadsStates):
    """Also serves text-only causal models of the Llama family: requests without pictures need no tower.

    Args:
        num_token_ids: ids from here on have no token (32002 of LLaVA-1.5's 32064 rows).
        image_token_id: the placeholder, which is never emitted.
        reads_tiles: True asks for tiled pictures, False takes the first tile of each and no newline; None reads
            whatever a request holds.
    """

    def __init__(
        self, model: nn.Module, *, num_token_ids: int, image_token_id: int | None, reads_tiles: bool | None = None
    ):
        never = () if image_token_id is None else (image_token_id,)
        model.requires_grad_(False)
        self.decoder = CachedDecoder(model, num_token_ids=num_token_ids, never=never)
        self.vocab_size, self.reads_tiles = self.decoder.vocab_size, reads_tiles

    def view(self, request: Request) -> Request:
        """The request as the target reads it. Raises `UserError` where its pictures are not cut for it."""
        if self.reads_tiles is False:
            return flat_view(request)
        if self.reads_tiles and any(p.modality == IMAGE and p.is_plain for p in pictures_of(request)):
            raise UserError(
                "the target reads pictures in tiles, and this one has a single tile",
                where=request.name,
                cure="set aspect: anyres (LLaVA-NeXT) or anyres_max_9 (LLaVA-OneVision) in the data section, or "
                "target.anyres: false to feed it one tile",
            )
        return request

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @torch.inference_mode()
    def prefill(self, request: Request, taps: Taps, *, capacity: int) -> tuple[LlavaSession, TargetStep]:
        """Run the prompt. `capacity` is the number of tokens that may follow it, drafted ones included."""
        request = self.view(request).to(self.device)
        length = len(request.ids)
        session = LlavaSession(self.decoder.new_cache(length + capacity), taps)
        embeds = self.decoder.embed(request.ids[None], request.modality[None], request.pixels, request.pictures)
        positions = torch.arange(length, device=self.device)[None]
        states = self.decoder.forward(
            embeds, session.cache, positions, layers=taps.layers, attention=taps.prefill_attention
        )
        session.cache.advance(length)
        feature = states.feature if taps.feature else None
        seen = torch.ones_like(positions, dtype=torch.bool)
        prompt = Prompt(request.ids[None], seen, positions, Guidance(), request.modality[None])
        scores = self.decoder.logits(states.feature[0, -1:])
        return session, TargetStep(scores, feature, states.layers, states.attention, prompt)

    @torch.inference_mode()
    def verify(self, session: LlavaSession, root: int, tree: Tree) -> TargetStep:
        device, past = self.device, session.cache.length
        ids = torch.cat([torch.tensor([root], device=device), tree.tokens.to(device)])
        states = self.decoder.forward(
            self.decoder.embed(ids[None]),
            session.cache,
            self._positions(past, tree)[None],
            None if tree.is_chain else tree.ancestor_mask(device),
            layers=session.taps.layers,
        )
        feature = states.feature if session.taps.feature else None
        return TargetStep(self.decoder.logits(states.feature[0]), feature, states.layers)

    def commit(self, session: LlavaSession, path: Sequence[int]) -> None:
        session.cache.commit([0, *(node + 1 for node in path)])

    def _positions(self, past: int, tree: Tree) -> Tensor:
        """A node stands where its depth puts it, whatever its place in the pass."""
        if tree.is_chain:
            return torch.arange(past, past + tree.num_nodes + 1, device=self.device)
        return torch.tensor([past, *(past + depth for depth in tree.depths)], device=self.device)
