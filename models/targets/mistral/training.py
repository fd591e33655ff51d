"""The training forward over a Mistral 3 or a Pixtral. Letters: B rows, T tokens, D width, n visual tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ....core.batch import Batch
from ....core.pictures import PatchGrid, whole_picture
from ...packed_row import last_states
from ..llava.training import LlavaTraining
from ..whole_pictures import WholePicturesTraining
from .model import merge_of, see_whole


class MistralTraining(WholePicturesTraining):
    """The training forward over a Mistral 3 or a Pixtral: the common loss over states of its own."""

    parts_of = staticmethod(LlavaTraining.parts_of)

    def hidden_states(self, batch: Batch) -> Tensor:
        """Final states [B,T,D] of the language model."""
        embeds, _ = self._embeds(batch)
        return last_states(self.model.model.language_model, batch, embeds, batch.positions[0])

    def _see(self, pixels: Tensor, batch: Batch) -> Tensor:
        return see_whole(self.model, pixels, batch.pictures)

    def _see_nothing(self, batch: Batch) -> Tensor:
        config = self.model.config
        merge, side = merge_of(config), int(config.vision_config.patch_size)
        patches = torch.zeros(merge**2, 3 * side**2, device=batch.ids.device)
        return see_whole(self.model, patches, [whole_picture(PatchGrid(1, merge, merge, merge))])
