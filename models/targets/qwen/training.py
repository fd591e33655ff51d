"""The training forward over a Qwen-VL or a Qwen3.5. Letters: B rows, T tokens, n visual tokens, D width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ....core.batch import TEXT, Batch
from ....core.pictures import PatchGrid, whole_picture
from ....core.positions import Resume, place_positions
from ....core.states import places_of, put_at, uploaded
from ...packed_row import last_states
from ...parts import Part
from ...training import ModelTraining
from .model import SeenPatches, added_behind, position_scheme, see_patches, use_places
from .windows import use_windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class QwenTraining(ModelTraining):
    """The training forward over a Qwen-VL: the common loss over states of its own.

    Args:
        resume: where text goes on after a clip.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        trainable: Sequence[Part],
        *,
        resume: Resume = "max_plus_one",
        **settings: Any,
    ):
        super().__init__(model, trainable, **settings)
        self.scheme = position_scheme(model.config, resume)
        use_windows(model.config.vision_config)
        use_places(model)

    @staticmethod
    def parts_of(model: PreTrainedModel) -> dict[Part, nn.Module]:
        """The mergers are what LLaVA calls the projector; the LM head belongs to the language model."""
        rest = dict(model.model.visual.named_children())
        mergers = [rest.pop("merger"), *cast(nn.ModuleList, rest.pop("deepstack_merger_list", nn.ModuleList()))]
        return {
            "vision_tower": nn.ModuleList(rest.values()),
            "projector": nn.ModuleList(mergers),
            "language_model": nn.ModuleList([model.model.language_model, model.lm_head]),
        }

    def hidden_states(self, batch: Batch) -> Tensor:
        """Final states [B,T,D] of the language model."""
        core, visual = self.model.model, batch.on_host("modality") != TEXT
        real = batch.on_host("attention_mask")
        # Every rank runs its tower in every step; where no row has a picture, over one that changes nothing.
        pixels = None if batch.num_dummy_images else batch.pixels
        seen = self._see_nothing(batch) if pixels is None else see_patches(self.model, pixels, batch.pictures)
        embeds = core.get_input_embeddings()(batch.ids)
        more: dict[str, Any] = {}
        if pixels is None:
            nothing = torch.stack([part.sum() for part in (seen.features, *seen.deepstack)]).sum()
            embeds = embeds + 0.0 * nothing.to(embeds)
        else:
            embeds = put_at(embeds, places_of(visual, embeds.device), seen.features)
            more = added_behind(seen.deepstack, visual[real] if batch.packed else visual)
        positions, _ = place_positions(batch.on_host("modality"), real, batch.pictures, self.scheme)
        return last_states(core.language_model, batch, embeds, uploaded(positions, embeds.device), **more)

    def _see_nothing(self, batch: Batch) -> SeenPatches:
        vision = self.model.config.vision_config
        side, merge = vision.patch_size, vision.spatial_merge_size
        numbers = 3 * vision.temporal_patch_size * side**2
        patches = torch.zeros(merge**2, numbers, device=batch.ids.device)
        return see_patches(self.model, patches, [whole_picture(PatchGrid(1, merge, merge, merge))])
