"""The forward over Gemma 4, cached and in training: masks by layer type, shared keys and values, tables of each layer.

Five of six layers see a window of positions; in the larger models the tokens of one picture see each other there. The
last layers of the smaller models read keys and values of an earlier one, and a table of its own feeds each layer. The
tower averages 3 x 3 patches to one token.
Letters: B or R rows, N new positions, K past and new positions, D width, L layers, E width of a layer's own embedding,
V vocabulary, P patches, C numbers of a patch, n visual tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....core.batch import Batch
from ....core.pictures import TEXT, PatchGrid
from ....core.states import uploaded
from ...attention import added, causal_among
from ...decoding.cache import Cache
from ...decoding.decoder import PromptRows
from ...hub import config_value
from ...packed_row import PackedRow
from ...parts import Part
from ..native_pictures import NativeSizeDecoder, NativeSizeTraining
from .model import apart, blocks_of, capped, layer_tables, windowed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GemmaDecoder(NativeSizeDecoder):
    """A dense Gemma 4 in eval mode.

    Embeddings are [R,N,D+L*E]: what a layer's own table holds of a token stands after its embedding, since nothing
    else of a token reaches `forward`.
    """

    def __init__(self, model: nn.Module, *, num_token_ids: int):
        super().__init__(model, num_token_ids=num_token_ids)
        config = self.language_model.config
        self._width: int = config.hidden_size
        self._window: int = config.sliding_window
        # Tokens of one picture see each other in the layers with a window.
        self.two_way = config.use_bidirectional_attention == "vision"

    def new_cache(self, capacity: int) -> Cache:
        from ...decoding.model_cache import ModelCache

        text = self.language_model.config
        # The last layers of smaller models have no keys and values of their own.
        return ModelCache(int(text.num_hidden_layers - (config_value(text, "num_kv_shared_layers") or 0)), capacity)

    @staticmethod
    def see_picture(model: Any, patches: Tensor, grid: PatchGrid) -> Tensor:
        core, rows, columns = model.model, *(torch.arange(n, device=patches.device) for n in (grid.rows, grid.columns))
        places = torch.cartesian_prod(rows, columns).flip(-1)  # [P,2]: across, down
        output = core.vision_tower(pixel_values=patches[None], pixel_position_ids=places[None])
        return core.embed_vision(inputs_embeds=output.last_hidden_state)

    def embed(self, ids: Tensor, modality: Tensor | None = None, *args: Any, **settings: Any) -> Tensor:
        """Every decoder's embeddings, with the layers' own tables beside them, [R,N,D+L*E]; these have the pad token's
        row at a visual token.
        """
        embeds = super().embed(ids, modality, *args, **settings)
        tables = layer_tables(self.language_model, ids, None if modality is None else modality != TEXT)
        return embeds if tables is None else torch.cat([embeds, tables.to(embeds)], dim=-1)

    def prompts(self, ids: Tensor, modality: Tensor, *args: Any, **settings: Any) -> PromptRows:
        """Embed prompts as every decoder does, and number the pictures whose tokens see each other."""
        prompts = super().prompts(ids, modality, *args, **settings)
        if not self.two_way:
            return prompts
        on_host = settings.get("on_host")
        kinds = modality.cpu() if on_host is None else on_host[0]
        if not bool((kinds != TEXT).any()):
            return prompts
        return replace(prompts, blocks=uploaded(apart(blocks_of(kinds != TEXT)), prompts.embeds.device))

    def _whole(self, pieces: Iterable[tuple[int, int, bool]], prompts: PromptRows) -> Iterable[tuple[int, int, bool]]:
        """A picture whose tokens see each other is run in one chunk: its keys must all be there."""
        if prompts.blocks is None or prompts.blocks.is_meta:  # a dry run's have no values
            yield from pieces
            return
        blocks, first = prompts.blocks, 0
        inside = ((blocks[:, 1:] == blocks[:, :-1]) & (blocks[:, 1:] >= 0)).any(0).tolist()  # of places from 1 on
        for _, stop, wanted in pieces:
            while stop <= len(inside) and inside[stop - 1]:
                stop += 1
            if stop > first:
                yield first, stop, wanted
                first = stop

    def _extra_inputs(self, prompts: PromptRows, start: int, stop: int) -> Mapping[str, object]:
        return {} if prompts.blocks is None else {"blocks": prompts.blocks[:, start:stop]}

    def _inputs(
        self, embeds: Tensor, cache: Cache, places: Tensor, full: Tensor | None, additive: torch.dtype | None,
        more: Mapping[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        embeddings, tables = embeds[..., : self._width], embeds[..., self._width :]
        keys = cache.place(places, len(embeds))
        near = windowed(full, places, keys, self._window, more.get("blocks"))
        masks = {"full_attention": full, "sliding_attention": near}
        if additive is not None:
            masks = {kind: None if mask is None else added(mask, additive) for kind, mask in masks.items()}
        inputs: dict[str, Any] = {"inputs_embeds": embeddings, "attention_mask": masks}
        if tables.shape[-1]:
            inputs["per_layer_inputs"] = tables.unflatten(-1, (self.num_layers, -1))
        return inputs

    def capped(self, scores: Tensor) -> Tensor:
        return capped(self.language_model.config, scores)


class GemmaTraining(NativeSizeTraining):
    """The training forward over a Gemma 4, under the cap on scores."""

    decoder_class = GemmaDecoder

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
        embeds, visual = self._embeds(batch)
        return _last_states(self.model.model.language_model, batch, embeds, visual)


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
