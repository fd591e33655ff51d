"""LLaVA-1.5, NeXT and OneVision as targets: transformers' weights and modules, our positions, masks and cache."""

from __future__ import annotations

from torch import nn

from ...core.errors import UserError
from ...core.nouns import IMAGE, Request
from ..decoding.decoder import CachedDecoder
from ..pictures import flat_view, pictures_of
from .language import LanguageTarget


class LlavaTarget(LanguageTarget):
    """Also serves text-only causal models of the Llama family: requests without pictures need no tower.

    Args:
        num_token_ids: ids from here on have no token (32002 of LLaVA-1.5's 32064 rows).
        image_token_id: the placeholder, which is never emitted.
        reads_tiles: True asks for tiled pictures, False takes the first tile of each and no newline; None reads
            whatever a request holds.
        prefill_chunk: places of a prompt that are run at once; None: all.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_token_ids: int,
        image_token_id: int | None,
        reads_tiles: bool | None = None,
        prefill_chunk: int | None = None,
    ):
        never = () if image_token_id is None else (image_token_id,)
        decoder = CachedDecoder(model, num_token_ids=num_token_ids, never=never)
        super().__init__(decoder, prefill_chunk=prefill_chunk)
        self.reads_tiles = reads_tiles

    def view(self, request: Request) -> Request:
        """The request as the target reads it. Raises `UserError` where its pictures are not cut for it."""
        if any(picture.whole is not None for picture in request.pictures):
            raise UserError(
                "the target reads pictures in tiles, and these are cut for a Qwen-VL",
                where=request.name,
                cure="use the processor of a LLaVA for this target's requests",
            )
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
