"""The training forward over a LLaVA. Letters: B rows, T tokens, I images, P patches, C width of the tower, D width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....core.batch import TEXT, Batch
from ....core.errors import UserError
from ....core.states import places_of, put_at
from ...packed_row import last_states
from ...parts import Part
from ...training import ModelTraining
from .made_for_engines import own_projector, reading_of
from .model import selected_features
from .packing import Packing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _without_first(batch: Batch) -> Batch:
    """What a decoder asks of a batch, without the first token of each row."""
    cut: dict[str, Any] = {
        name: batch.on_host(name)[..., 1:] for name in ("ids", "attention_mask", "loss_mask", "modality")
    }
    device = batch.attention_mask.device
    bare = replace(batch, **cut, positions=batch.on_host("positions")[..., 1:] - 1, pixels=None, states=None)
    return bare if device.type == "cpu" else bare.to(device)


class LlavaTraining(ModelTraining):
    """The training forward over a LLaVA, of any of its kinds."""

    def __init__(self, model: PreTrainedModel, trainable: Sequence[Part], **settings: Any):
        if "vision_tower" in trainable and not reading_of(model.config).is_plain:
            raise UserError(
                "the draft reads the target's projected features, and its stage trains the tower under them",
                key="trainable", hint="leave vision_tower out: an engine runs the target's tower alone",
            )  # fmt: skip
        super().__init__(model, trainable, **settings)
        self.packing = Packing(model.model)

    @staticmethod
    def parts_of(model: PreTrainedModel) -> dict[Part, nn.Module]:
        """The model's modules by part."""
        core, newline = model.model, Packing(model.model)
        return {
            "vision_tower": core.vision_tower,
            # The newline comes between tokens of pictures: it learns with what makes those.
            "projector": own_projector(model)
            if newline.image_newline is None
            else nn.ModuleList([core.multi_modal_projector, newline]),
            # The LM head belongs to the language model.
            "language_model": nn.ModuleList([core.language_model, model.lm_head]),
        }

    def hidden_states(self, batch: Batch) -> Tensor:
        """Final states [B,T,D] of the language model, its feature: the LM head is still to come."""
        core = self.model.model
        embeds = core.get_input_embeddings()(batch.ids)
        if batch.pixels is not None:
            with torch.set_grad_enabled(self.trains_vision and torch.is_grad_enabled()):
                vision = self.selected_features(batch.pixels)
            features = core.multi_modal_projector(vision)  # [I,P,D]
            count = features.shape[0] - batch.num_dummy_images
            real = self.packing(features[:count], batch.pictures).to(embeds)
            embeds = put_at(embeds, places_of(batch.on_host("modality") != TEXT, embeds.device), real)
            # A dummy image keeps the projector in every rank's graph and changes nothing.
            embeds = embeds + 0.0 * features[count:].sum().to(embeds)
        if not self.num_unseen:
            return last_states(core.language_model, batch, embeds, batch.positions[0])
        # No first token is supervised, so that the state in its place is read by nobody.
        later = last_states(core.language_model, _without_first(batch), embeds[:, 1:], batch.positions[0, :, 1:] - 1)
        return F.pad(later, (0, 0, 1, 0))

    @property
    def num_unseen(self) -> int:
        return 0 if reading_of(self.model.config).first_token else 1

    def selected_features(self, pixels: Tensor) -> Tensor:
        """The tower's states that the projector reads, [I,P,C]."""
        return selected_features(self.model, pixels)
