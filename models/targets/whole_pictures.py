"""What families share whose tower reads pictures whole (Mistral 3, Pixtral, Gemma 4): training, and a request's check.

Letters: B samples, T places, D width, n visual tokens.
"""

from __future__ import annotations

from torch import Tensor

from ...core.batch import TEXT, VIDEO, Batch, Request
from ...core.errors import UserError
from ...core.states import places_of, put_at
from ..training import ModelTraining


class WholePicturesTraining(ModelTraining):
    """The common loss over states of its own. A family says how its tower reads pictures and how its decoder runs."""

    def _embeds(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Embeddings [B,T,D] with the pictures' features, and which places are visual [B,T], on the host."""
        core, visual = self.model.model, batch.on_host("modality") != TEXT
        embeds = core.get_input_embeddings()(batch.ids)
        # Every rank runs its tower in every step; where no row has a picture, over one that changes nothing.
        if batch.num_dummy_images or batch.pixels is None:
            return embeds + 0.0 * self._see_nothing(batch).sum().to(embeds), visual
        seen = self._see(batch.pixels, batch)
        return put_at(embeds, places_of(visual, embeds.device), seen.to(embeds)), visual

    def _see(self, pixels: Tensor, batch: Batch) -> Tensor:
        """Features [n,D] of a batch's pictures."""
        raise NotImplementedError

    def _see_nothing(self, batch: Batch) -> Tensor:
        """Features of a picture that no row has."""
        raise NotImplementedError


def check_whole(request: Request, merge: int) -> Request:
    """The request itself.

    Args:
        merge: patches along a side of what becomes one token.

    Raises:
        UserError: its pictures are cut for another family.
    """
    pictures = request.pictures
    if any(p.whole is None or p.whole.merge != merge or p.modality == VIDEO for p in pictures) or (
        request.pixels is not None and not pictures
    ):
        raise UserError(
            f"the target reads images whole, {merge} x {merge} patches a token, and these are cut for another family",
            where=request.name, hint="use its own processor for this target's requests",
        )  # fmt: skip
    return request
