"""The cached forward over Gemma 4: masks by layer type, shared keys and values, embeddings of each layer.

Five of six layers see a window of positions; in the larger models the tokens of one picture see each other there. The
last layers of the smaller models read keys and values of an earlier one, and a table of its own feeds each layer.
Letters: R rows, N new positions, K past and new positions, D width, L layers, E width of a layer's own embedding, V
vocabulary, P patches, n visual tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....core.pictures import TEXT, Picture
from ....core.states import uploaded
from ...attention import added
from ...decoding.cache import Cache
from ...decoding.decoder import CachedDecoder, PromptRows, with_features
from ...hub import own_layers
from .model import apart, blocks_of, capped, layer_tables, see_whole, windowed


class GemmaDecoder(CachedDecoder):
    """A dense Gemma 4 in eval mode.

    Embeddings are [R,N,D+L*E]: what a layer's own table holds of a token stands after its embedding, since nothing
    else of a token reaches `forward`.
    """

    def __init__(self, model: nn.Module, *, num_token_ids: int):
        super().__init__(model, num_token_ids=num_token_ids)
        config = self.language_model.config
        self._width: int = config.hidden_size
        self._own_layers: int = own_layers(config)
        self._window: int = config.sliding_window
        # Tokens of one picture see each other in the layers with a window.
        self.two_way = config.use_bidirectional_attention == "vision"

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache of `capacity` positions."""
        from .windowed import WindowedCache

        return WindowedCache(self._own_layers, capacity)

    def embed(
        self,
        ids: Tensor,
        modality: Tensor | None = None,
        pixels: Tensor | None = None,
        pictures: Sequence[Picture] = (),
        *,
        pool: int = 1,
        seen: Any = None,
    ) -> Tensor:
        """Return every decoder's embeddings, with the layers' own tables beside them, [R,N,D+L*E]; these have the pad
        token's row at a visual token.
        """
        embeds = self.language_model.get_input_embeddings()(ids)
        if pixels is not None:
            assert modality is not None
            seen = self.see(pixels, pictures) if seen is None else seen
            embeds = with_features(embeds, modality, self._features(seen, pictures, pool))
        tables = layer_tables(self.language_model, ids, None if modality is None else modality != TEXT)
        return embeds if tables is None else torch.cat([embeds, tables.to(embeds)], dim=-1)

    def see(self, pixels: Tensor, pictures: Sequence[Picture] = ()) -> Any:
        """[n,D] of patches [P,C]."""
        return see_whole(self.model, pixels, pictures)

    def _features(self, seen: Any, pictures: Sequence[Picture], pool: int) -> Tensor:
        assert pool == 1, "the patches of a picture are pooled as they are"
        features: Tensor = seen
        return features

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

    def _deepstack(self, prompts: PromptRows, start: int, stop: int) -> Mapping[str, object]:
        return {} if prompts.blocks is None else {"blocks": prompts.blocks[:, start:stop]}

    def _inputs(
        self, embeds: Tensor, cache: Cache, places: Tensor, full: Tensor | None, additive: torch.dtype | None,
        more: Mapping[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        from .windowed import WindowedCache

        assert isinstance(cache, WindowedCache), "a cache that knows no positions"
        own, tables = embeds[..., : self._width], embeds[..., self._width :]
        keys = cache.place(places, len(embeds))
        near = windowed(full, places, keys, self._window, more.get("blocks"))
        masks = {"full_attention": full, "sliding_attention": near}
        if additive is not None:
            masks = {kind: None if mask is None else added(mask, additive) for kind, mask in masks.items()}
        inputs: dict[str, Any] = {"inputs_embeds": own, "attention_mask": masks}
        if tables.shape[-1]:
            inputs["per_layer_inputs"] = tables.unflatten(-1, (self.num_layers, -1))
        return inputs

    def capped(self, scores: Tensor) -> Tensor:
        """Scores under the model's soft cap."""
        return capped(self.language_model.config, scores)
