"""What heads read of a target beside decoding: its config, embedding and scores, and states of whole sequences.

Letters: B rows, T places, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.errors import UserError
from ...core.nouns import Batch
from ...core.states import Taps, TargetStates, feature_places, visual_places
from ..decoding.decoder import CachedDecoder
from .base import TargetShape, language_shape


class ReadsStates:
    """What trains a drafter of a language model: its shape, embedding, scores and states, over a `CachedDecoder`."""

    decoder: CachedDecoder
    prefill_chunk: int | None = None

    @property
    def config(self) -> Any:
        """transformers' config of the language model."""
        return self.decoder.language_model.config

    @property
    def shape(self) -> TargetShape:
        """What heads mirror of the language model."""
        return language_shape(self.config)

    @property
    def embedding(self) -> Tensor:
        """[V,D] of token ids."""
        return self.decoder.language_model.get_input_embeddings().weight

    @property
    def scores(self) -> Callable[[Tensor], Tensor]:
        """[...,D] -> [...,V] float32; minus infinity where no token may come."""
        return self.decoder.logits

    def guided(self, feature: Tensor, steps: Sequence[int]) -> Tensor:
        """[1,N,D] -> [N,V]: one row, nothing to guide."""
        return self.scores(feature[0])

    # Not inference mode: a head's backward could not read what was made in it.
    @torch.no_grad()
    def states(self, batch: Batch, taps: Taps) -> TargetStates:
        """One teacher-forced pass over `batch` (right padded) as `prefill` runs a prompt; what is not kept is zero."""
        self._check(taps)
        batch = batch.to(self.decoder.device)
        mask, real = batch.attention_mask, None
        if batch.pixels is not None and len(batch.pixels) > batch.num_dummy_images:
            real = batch.pixels[: len(batch.pixels) - batch.num_dummy_images]
        prompts = self.decoder.prompts(batch.ids, batch.modality, real, batch.pictures, mask=mask)
        # Padding stands behind everything that is read: a causal pass never lets it be seen.
        states = self.decoder.run(
            replace(prompts, mask=None),
            self.decoder.new_cache(batch.ids.shape[1]),
            layers=taps.layers,
            chunk=self.prefill_chunk,
        )
        text = feature_places(batch.modality, mask, batch.loss_mask, taps.everywhere)
        visual = visual_places(batch.modality, mask)
        kept = {layer: torch.zeros_like(mask) for layer in taps.layers}
        for layer in taps.text_layers:
            kept[layer] = kept[layer] | text
        for layer in taps.visual_layers:
            kept[layer] = kept[layer] | visual
        return TargetStates(
            feature=_only(states.feature, text) if taps.feature else None,
            layers={layer: _only(states.layers[layer], places) for layer, places in kept.items()},
            positions=prompts.positions,
        )

    def _check(self, taps: Taps) -> None:
        """Raises `UserError` where the target's states after a layer are not what the layer's name says."""
        behind = [layer for layer in taps.layers if layer > self.decoder.num_layers]
        if behind:
            raise UserError(
                f"states after layer {behind[0]} are wanted, and the target has {self.decoder.num_layers}",
                cure=f"name layers from 0 (the embedding) to {self.decoder.num_layers}",
            )
        deepstack = self.decoder.num_deepstack
        if early := [layer for layer in taps.visual_layers if 1 <= layer <= deepstack]:
            raise UserError(
                f"visual states after layer {early[0]} are wanted, and Qwen3-VL adds to them what its tower saw behind "
                f"each of its first {deepstack} layers: a tap there and the next layer's input are two things",
                cure=f"tap visual places above layer {deepstack} (half of the layers is usual), or at 0, the embedding",
            )


def _only(states: Tensor, places: Tensor) -> Tensor:
    return states.masked_fill(~places.unsqueeze(-1), 0)
