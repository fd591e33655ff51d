"""The training forward over a Gemma 4. Letters: B rows, T tokens, D width, n visual tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....core.batch import Batch
from ....core.pictures import PatchGrid, whole_picture
from ...attention import added, causal_among
from ...packed_row import PackedRow
from ...parts import Part
from ..whole_pictures import WholePicturesTraining
from .model import apart, blocks_of, capped, layer_tables, see_whole, windowed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GemmaTraining(WholePicturesTraining):
    """The training forward over a Gemma 4: the common loss over states of its own, under the cap on scores."""

    @staticmethod
    def parts_of(model: PreTrainedModel) -> dict[Part, nn.Module]:
        """The model's modules by part; the layers' own tables and the LM head belong to the language model."""
        core = model.model
        return {
            "vision_tower": core.vision_tower,
            "projector": core.embed_vision,
            "language_model": nn.ModuleList([core.language_model, model.lm_head]),
        }

    def scores(self, hidden: Tensor) -> Tensor:
        return capped(self.model.config.get_text_config(), super().scores(hidden))

    def hidden_states(self, batch: Batch) -> Tensor:
        """Final states [B,T,D] of the language model."""
        embeds, visual = self._embeds(batch)
        return _last_states(self.model.model.language_model, batch, embeds, visual)

    def _see(self, pixels: Tensor, batch: Batch) -> Tensor:
        return see_whole(self.model, pixels, batch.pictures)

    def _see_nothing(self, batch: Batch) -> Tensor:
        vision = self.model.config.vision_config
        merge, side = int(vision.pooling_kernel_size), int(vision.patch_size)
        patches = torch.zeros(merge**2, 3 * side**2, device=batch.ids.device)
        return see_whole(self.model, patches, [whole_picture(PatchGrid(1, merge, merge, merge))])


def _last_states(decoder: Any, batch: Batch, embeds: Tensor, visual: Tensor) -> Tensor:
    """Final states [B,T,D] over the embeddings [B,T,D] of a batch, packed or padded."""
    places, two_way = batch.positions[0], decoder.config.use_bidirectional_attention == "vision"
    blocks = apart(blocks_of(visual)).to(embeds.device) if two_way and bool(visual.any()) else None
    tables = layer_tables(decoder, batch.ids, visual.to(embeds.device))
    if batch.packed:
        row = PackedRow.of(batch.on_host("attention_mask"), embeds.device)
        full = row.mask[None, None]
        embeds, places = row.pack(embeds), row.pack(places)
        tables = None if tables is None else row.pack(tables)
        blocks = None if blocks is None else row.pack(blocks)
    else:
        full = causal_among(batch.attention_mask)[:, None]
    near = windowed(full, places, places, decoder.config.sliding_window, blocks)
    masks = {"full_attention": full, "sliding_attention": near}
    if decoder.config._attn_implementation == "eager":
        masks = {kind: added(mask, embeds.dtype) for kind, mask in masks.items()}
    more = {} if tables is None else {"per_layer_inputs": tables.unflatten(-1, (decoder.config.num_hidden_layers, -1))}
    states: Tensor = decoder(
        inputs_embeds=embeds, attention_mask=masks, position_ids=places, use_cache=False, **more
    ).last_hidden_state
    return row.spread(states) if batch.packed else states
