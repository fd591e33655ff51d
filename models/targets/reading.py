"""What heads read of a target beside decoding: its config, embedding and scores, and states of whole sequences.

Letters: B rows, T places, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.nouns import Batch
from ...core.states import StatesBatch, StatesWanted, feature_places, visual_places
from ..decoding.decoder import CachedDecoder


class ReadsStates:
    """`ReadTarget` over a `CachedDecoder`, for every target that decodes with one."""

    decoder: CachedDecoder
    prefill_chunk: int | None = None

    @property
    def config(self) -> Any:
        """transformers' config of the language model."""
        return self.decoder.language_model.config

    @property
    def embedding(self) -> Tensor:
        """[V,D] of token ids."""
        return self.decoder.language_model.get_input_embeddings().weight

    def scores(self, feature: Tensor) -> Tensor:
        """[...,D] -> [...,V] float32; minus infinity where no token may come."""
        return self.decoder.logits(feature)

    # Not inference mode: a head's backward could not read what was made in it.
    @torch.no_grad()
    def states(self, batch: Batch, wanted: StatesWanted, *, seeds: Sequence[int] = ()) -> StatesBatch:
        """One teacher-forced pass over `batch` (right padded) as `prefill` runs a prompt; what is not kept is zero."""
        batch = batch.to(self.decoder.device)
        mask, real = batch.attention_mask, None
        if batch.pixels is not None and len(batch.pixels) > batch.num_dummy_images:
            real = batch.pixels[: len(batch.pixels) - batch.num_dummy_images]
        embeds = self.decoder.embed(batch.ids, batch.modality, real, batch.pictures)
        # Padding stands behind everything that is read: a causal pass never lets it be seen.
        positions = torch.arange(batch.ids.shape[1], device=mask.device).expand(1, *batch.ids.shape)
        states = self.decoder.forward(
            embeds, self.decoder.new_cache(batch.ids.shape[1]), positions[0], layers=wanted.layers
        )
        text, visual = feature_places(batch.modality, mask, batch.loss_mask), visual_places(batch.modality, mask)
        kept = {layer: torch.zeros_like(mask) for layer in wanted.layers}
        for layer in wanted.text_layers:
            kept[layer] = kept[layer] | text
        for layer in wanted.visual_layers:
            kept[layer] = kept[layer] | visual
        return StatesBatch(
            ids=batch.ids,
            mask=mask,
            loss_mask=batch.loss_mask,
            modality=batch.modality,
            positions=positions,
            feature=_only(states.feature, text) if wanted.feature else None,
            sample_ids=batch.sample_ids,
            layers={layer: _only(states.layers[layer], places) for layer, places in kept.items()},
            seeds=tuple(seeds),
        )


def _only(states: Tensor, places: Tensor) -> Tensor:
    return states.masked_fill(~places.unsqueeze(-1), 0)
