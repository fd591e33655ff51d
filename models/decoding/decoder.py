"""One cached forward over transformers' decoders: LLaVA or a causal language model, target or drafter.

Positions and masks are ours and explicit; `Cache` holds the past. Ids that must never be emitted
(rows of the vocabulary without a token, and the image placeholder) get minus infinity here, once.
Letters: R rows, N new positions, D width, V vocabulary, P past positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...core.nouns import IMAGE
from .cache import Cache


@dataclass(frozen=True)
class DecoderStates:
    """What a forward leaves: the feature and, where asked for, states after layers and attention weights."""

    feature: Tensor  # [R,N,D] post-final-norm
    layers: dict[int, Tensor]  # layer -> [R,N,D], the state after that many decoder layers
    attention: dict[int, Tensor]  # layer -> [R,heads,N,P+N]


class CachedDecoder:
    """Wraps a model in eval mode.

    Args:
        model: `LlavaForConditionalGeneration` or a causal language model with `.model` and `.lm_head`.
        num_token_ids: ids from here on have no token.
        never: further ids that are never emitted (the image placeholder).
    """

    def __init__(self, model: nn.Module, *, num_token_ids: int, never: Sequence[int] = ()):
        self.model = model.eval()
        self.core = model.model
        self.language_model = getattr(self.core, "language_model", self.core)
        config = self.language_model.config
        self.num_layers, self.vocab_size = config.num_hidden_layers, config.vocab_size
        self.max_positions = getattr(config, "max_position_embeddings", None)
        device = self.device
        self._banned = torch.zeros(self.vocab_size, dtype=torch.bool, device=device)
        self._banned[num_token_ids:] = True
        self._banned[[i for i in never if i < self.vocab_size]] = True

    @property
    def device(self) -> torch.device:
        # Under an accelerate device map the embedding says where inputs go.
        return self.language_model.get_input_embeddings().weight.device

    @property
    def reads_images(self) -> bool:
        return hasattr(self.core, "multi_modal_projector")

    def new_cache(self, capacity: int) -> Cache:
        return Cache(self.num_layers, capacity)

    def embed(self, ids: Tensor, modality: Tensor | None = None, pixels: Tensor | None = None) -> Tensor:
        """Embeddings [R,N,D] of ids [R,N]; runs of image tokens are replaced by projected features of `pixels`."""
        embeds = self.language_model.get_input_embeddings()(ids)
        if pixels is not None:
            assert modality is not None
            dtype = next(self.core.vision_tower.parameters()).dtype
            features = self.core.get_image_features(pixel_values=pixels.to(dtype), return_dict=True).pooler_output
            joined = torch.cat(list(features)).to(embeds)
            embeds = embeds.masked_scatter((modality == IMAGE).unsqueeze(-1), joined)
        return embeds

    def forward(
        self,
        embeds: Tensor,
        cache: Cache,
        positions: Tensor,
        mask: Tensor | None = None,
        *,
        layers: Sequence[int] = (),
        attention: Sequence[int] = (),
    ) -> DecoderStates:
        """Run N new positions [R,N,D] behind the cache's committed ones (the caller commits).

        Args:
            positions: [R,N] int64.
            mask: [N,K] or [R,N,K] bool over the last K of the past and new positions (what lies before
                them is seen); None is causal.
            layers: 0 is the embedding, i the state after i decoder layers.
        """
        rows, count = embeds.shape[:2]
        total = cache.length + count
        full = torch.ones(rows, 1, count, total, dtype=torch.bool, device=embeds.device)
        if mask is not None:
            full[..., total - mask.shape[-1] :] = mask if mask.dim() == 2 else mask.unsqueeze(1)
        elif count > 1:
            full[..., cache.length :].tril_()
        output = self.language_model(
            inputs_embeds=embeds,
            attention_mask=full,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=bool(layers),
            output_attentions=bool(attention),
        )
        return DecoderStates(
            output.last_hidden_state,
            {layer: output.hidden_states[layer] for layer in layers},
            {layer: output.attentions[layer] for layer in attention},
        )

    def logits(self, feature: Tensor) -> Tensor:
        """Scores [...,V] float32 with minus infinity where no token may come."""
        return self.model.lm_head(feature).float().masked_fill_(self._banned, float("-inf"))
