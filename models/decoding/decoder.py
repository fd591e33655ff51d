"""One cached forward over transformers' decoders, of targets and drafters; families that see extend it.

Positions and masks are ours and explicit; `Cache` holds the past. Ids that must never be emitted
(rows of the vocabulary without a token, and the image placeholder) get minus infinity here, once.
Letters: R rows, N new positions, D width, V vocabulary, P past positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.pictures import TEXT, Picture
from ...core.positions import FLAT, PositionScheme, place_positions
from ...core.states import uploaded
from ..attention import added, behind_all, check_takes_masks, use_attend
from ..fast.cuda_graphs import Graphs
from ..hub import config_value, kv_shapes
from ..packed_row import PackedRow, reads_bounds
from ..parts import language_model_of, placeholder_ids
from .cache import Cache
from .tapped import tapped

_ATTENTION_CHUNK = 256  # positions per chunk where attention weights are wanted: scores are [R,heads,N,P+N]


@dataclass(frozen=True)
class DecoderStates:
    """A forward's outputs: the feature and, on request, hidden states of layers and attention weights."""

    feature: Tensor  # [R,N,D] post-final-norm
    layers: dict[int, Tensor]  # layer -> [R,N,D], the state after that many decoder layers
    attention: dict[int, Tensor]  # layer -> [R,heads,P+N] float32, the mean over the N queries


@dataclass(frozen=True)
class PromptRows:
    """Prompts as the decoder runs them, padded on either side."""

    embeds: Tensor  # [R,T,D]
    positions: Tensor  # [n,R,T] int64: n coordinates, 1 or 3
    next_position: Tensor  # [R] int64, on either device: the position of a row's next token
    mask: Tensor | None = None  # [R,T] bool: no padding; None: there is none that could be seen
    visual: Tensor | None = None  # [R,T] bool, on the CPU; given where `deepstack` is
    deepstack: tuple[Tensor, ...] = ()  # of the first layers: [n,D] that is added after each, at visual tokens
    row: PackedRow | None = None  # whose tokens these are: samples that do not see each other; None: one each
    # [R,T] int64: of a picture whose tokens see each other (Gemma 4) a number of its own, elsewhere -1; None: no such
    blocks: Tensor | None = None

    @property
    def rope_delta(self) -> int:
        """M-RoPE's delta: a token after this single prompt has its cache index plus this as its position."""
        assert len(self.next_position) == 1, "of one row"
        return int(self.next_position[0]) - self.embeds.shape[1]


class CachedDecoder:
    """Wraps a model in eval mode.

    Args:
        model: a causal language model with `.model` and `.lm_head`, or one of a family that extends this.
        num_token_ids: ids from here on have no token.
        never: further ids that are never emitted, beside the model's own placeholders of images and clips.
    """

    scheme: PositionScheme = FLAT
    num_deepstack = 0  # first layers after which visual states are added (Qwen3-VL)

    def __init__(self, model: nn.Module, *, num_token_ids: int, never: Sequence[int] = ()):
        # transformers has no common type for these models: their attributes are checked where they are read.
        self.model = cast(Any, model.eval())
        self.num_token_ids, self.never = num_token_ids, tuple(never)
        self.core = self.model.model
        self.language_model = cast(Any, language_model_of(self.model))
        config = self.language_model.config
        if any(heads != config.num_attention_heads for heads, _ in kv_shapes(config)):
            use_attend(config)  # where it would run sdpa
        check_takes_masks(config)
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = config_value(config, "max_position_embeddings")
        # Who changes the mask of some layers (`tapped.unseen_from`) needs one in every pass.
        self.always_masks = False
        self.graphs: Graphs | None = None  # of passes over few positions; None: they run eagerly
        device = self.device
        named = {i for i in (*never, *placeholder_ids(self.model.config)) if 0 <= i < num_token_ids}
        self._banned = torch.tensor(
            sorted({*named, *range(num_token_ids, self.vocab_size)}), dtype=torch.int64, device=device
        )

    @property
    def device(self) -> torch.device:
        """The device of inputs."""
        # Under an accelerate device map the embedding says where inputs go.
        return self.language_model.get_input_embeddings().weight.device

    @property
    def banned(self) -> list[int]:
        """Ids that are never emitted: placeholders, and rows of the vocabulary without a token."""
        return self._banned.tolist()

    @property
    def reads_first(self) -> bool:
        """Whether it reads a prompt's first token: drafts for engines may be trained without."""
        return True

    @property
    def reads_newlines(self) -> bool:
        """Whether it can read tiled pictures, whose rows end with a learned newline embedding."""
        return False

    @property
    def _eager(self) -> bool:
        return self.language_model.config._attn_implementation == "eager"

    def request_cache(self, capacity: int) -> Cache:
        """An empty cache for a request: that of the graphs, where there are any."""
        return self.new_cache(capacity) if self.graphs is None else self.graphs.new_cache(capacity)

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache of `capacity` positions."""
        from .model_cache import ModelCache

        return ModelCache(self.num_layers, capacity)

    def embed(
        self,
        ids: Tensor,
        modality: Tensor | None = None,
        pixels: Tensor | None = None,
        pictures: Sequence[Picture] = (),
        *,
        pool: int = 1,
        encoded: Any = None,
    ) -> Tensor:
        """Embeddings [R,N,D] of ids [R,N]; runs of image and video tokens are replaced by features of `pixels`.

        Args:
            pictures: how the tiles of `pixels` become runs, in row order; none given: each is a plain picture.
            pool: patches of `pool` x `pool` become one feature before the projector; runs are as much shorter.
            encoded: what `see` made of `pixels`; None: the tower runs.
        """
        embeds = self.language_model.get_input_embeddings()(ids)
        if pixels is not None:
            assert modality is not None
            encoded = self.see(pixels, pictures) if encoded is None else encoded
            embeds = with_features(embeds, modality, self._features(encoded, pictures, pool))
        return embeds

    def _features(self, encoded: Any, pictures: Sequence[Picture], pool: int) -> Tensor:
        """[P,D] of the visual tokens, in order, of what `see` made."""
        raise NotImplementedError

    def see(self, pixels: Tensor, pictures: Sequence[Picture] = ()) -> Any:
        """The tower's output for pictures, in the family's own layout: one pass serves every pooling."""
        raise NotImplementedError

    def num_features(self, pixels: Tensor, pictures: Sequence[Picture]) -> int:
        """The number of visual tokens of `pixels`: a prompt must have as many places."""
        return len(self._features(self.see(pixels, pictures), pictures, 1))

    def prompts(
        self,
        ids: Tensor,
        modality: Tensor,
        pixels: Tensor | None = None,
        pictures: Sequence[Picture] = (),
        *,
        mask: Tensor | None = None,
        pool: int = 1,
        encoded: Any = None,
        on_host: tuple[Tensor, Tensor | None] | None = None,
    ) -> PromptRows:
        """Embeds ids [R,T] with their pictures and computes their positions: the input of `run`.

        Args:
            mask: [R,T] bool: no padding; None: there is none.
            pool, encoded: as in `embed`.
            on_host: modality and mask on the CPU, where the caller has them: nothing then waits for the device.
        """
        if pixels is not None and encoded is None:
            encoded = self.see(pixels, pictures)
        embeds = self.embed(ids, modality, pixels, pictures, pool=pool, encoded=encoded)
        kinds, shown = (modality, mask) if on_host is None else on_host
        real = torch.ones_like(kinds, dtype=torch.bool) if shown is None else shown
        positions, next_position = place_positions(kinds, real, pictures, self.scheme)
        positions = uploaded(positions, embeds.device)
        deepstack = tuple(part.to(embeds.device) for part in self._deepstack_of(encoded))  # the tower may lie elsewhere
        return PromptRows(
            embeds, positions, next_position, mask, (kinds != TEXT).cpu() if deepstack else None, deepstack
        )

    def _deepstack_of(self, encoded: Any) -> tuple[Tensor, ...]:
        """The states that are added after the first layers, from the output of `see` (Qwen3-VL)."""
        return ()

    def run(
        self,
        prompts: PromptRows,
        cache: Cache,
        *,
        layers: Sequence[int] = (),
        attention: Sequence[int] = (),
        queries: Tensor | None = None,
        chunk: int | None = None,
    ) -> DecoderStates:
        """Run whole prompts into an empty cache, which then holds them, `chunk` places at a time (None: at once).

        Attention is averaged over the places `queries` [T] bool, [R,heads,T]; None: over all.
        """
        length, parts = prompts.embeds.shape[1], []
        pieces = _pieces(length, chunk or length, queries if attention else None)
        for start, stop, wants_attention in self._whole(pieces, prompts):
            part = self.forward(
                prompts.embeds[:, start:stop],
                cache,
                prompts.positions[:, :, start:stop],
                self._visible(prompts, start, stop, wants_weights=bool(attention)),
                layers=layers,
                attention=attention if wants_attention else (),
                more=self._extra_inputs(prompts, start, stop),
            )
            cache.advance(stop - start)
            parts.append(part)
        return parts[0] if len(parts) == 1 else _joined(parts, length)

    def _visible(self, prompts: PromptRows, start: int, stop: int, *, wants_weights: bool) -> Tensor | None:
        """[R,N,stop] bool: what the places from `start` to `stop` see; None: all up to themselves. Of a packed row that
        is run at once `PackedRow.bounds`, where attention reads them.
        """
        row, mask = prompts.row, prompts.mask
        if row is None and mask is None:
            return None
        whole = stop - start == prompts.embeds.shape[1] and not (wants_weights or self.always_masks)
        if row is not None and whole and reads_bounds(self.language_model.config, prompts.embeds):
            return row.bounds
        places = torch.arange(stop, device=prompts.embeds.device)
        causal = places[None, :] <= places[start:, None]
        if row is not None:
            return (causal & (row.segments[start:stop, None] == row.segments[:stop]))[None]
        assert mask is not None
        # Padding attends to itself, because the softmax of a fully masked row is undefined.
        return (causal & mask[:, None, :stop]) | (places[None, :] == places[start:, None])

    def _whole(self, pieces: Iterable[tuple[int, int, bool]], prompts: PromptRows) -> Iterable[tuple[int, int, bool]]:
        """The chunks of a prompt, none of which may cut what must run at once."""
        return pieces

    def _extra_inputs(self, prompts: PromptRows, start: int, stop: int) -> Mapping[str, Any]:
        """Further inputs of the model for these positions, besides the embeddings."""
        return {}

    def forward(
        self,
        embeds: Tensor,
        cache: Cache,
        positions: Tensor,
        mask: Tensor | None = None,
        *,
        layers: Sequence[int] = (),
        attention: Sequence[int] = (),
        more: Mapping[str, Any] | None = None,
    ) -> DecoderStates:
        """Run N new positions [R,N,D] after the cache's committed ones (the caller commits).

        Args:
            positions: [R,N] int64, or [n,R,N] in coordinates; a single one counts for all.
            more: what the model takes beside these.
            mask: [N,K] or [R,N,K] bool over the last K of the past and new positions (what lies before
                them is seen); None is causal. Or [1,1,N,K] over all K, to be added to the scores.
            layers: 0 is the embedding, i the state after i decoder layers.
        """
        plain = not (attention or more or self.always_masks)
        if self.graphs is not None and plain and self.graphs.take(cache, embeds.shape[1]):

            def run(visible: Tensor, embeds: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
                states = self._run_masked(embeds, cache, positions, visible[:, None], layers)
                return states.feature, *(states.layers[layer] for layer in layers)

            feature, *by_layer = self.graphs(tuple(layers), run, cache, mask, (embeds, 1), (positions, -1))
            return DecoderStates(feature, dict(zip(layers, by_layer, strict=True)), {})
        if mask is None or mask.dtype == torch.bool:  # else `PackedRow.bounds`, or added to the scores
            mask = self._mask(embeds, cache.length, mask, wants_weights=bool(attention))
        return self._run_masked(embeds, cache, positions, mask, layers, attention, more)

    def _run_masked(
        self, embeds: Tensor, cache: Cache, positions: Tensor, full: Tensor | None, layers: Sequence[int],
        attention: Sequence[int] = (), more: Mapping[str, Any] | None = None,
    ) -> DecoderStates:  # fmt: skip
        """Run `forward` with the mask that it makes, [R,1,N,K] bool over the K places of the cache."""
        places = self.coordinates(positions)
        # Eager attention, which alone returns its weights, adds the mask to the scores.
        dtype = embeds.dtype if attention or self._eager else None
        inputs = self._inputs(embeds, cache, places, full, dtype, more or {})
        with tapped(self.language_model, layers, attention) as (states, weights):
            output = self.language_model(**inputs, position_ids=places, past_key_values=cache, use_cache=True)
        if 0 in layers:
            states[0] = inputs["inputs_embeds"]
        # With a device map, layers are on several devices; the states are read where the embedding is.
        here = lambda by_layer: {layer: part.to(embeds.device) for layer, part in by_layer.items()}  # noqa: E731
        return DecoderStates(output.last_hidden_state.to(embeds.device), here(states), here(weights))

    def _mask(self, embeds: Tensor, past: int, mask: Tensor | None, *, wants_weights: bool) -> Tensor | None:
        """[R,1,N,K] bool: what N new positions [R,N,D] see; None where a kernel knows it: all, or causal from 0."""
        rows, count = embeds.shape[:2]
        eager = wants_weights or self._eager
        if mask is None and not eager and not self.always_masks and (count == 1 or past == 0):
            return None
        if mask is None:
            mask = torch.ones(count, count, dtype=torch.bool, device=embeds.device).tril_()
        return behind_all(mask, rows, past + count)

    def _inputs(
        self, embeds: Tensor, cache: Cache, places: Tensor, full: Tensor | None, additive: torch.dtype | None,
        more: Mapping[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        """The model's inputs for N new positions at `places`, besides these and the cache.

        Args:
            full: [R,1,N,K] bool: what they see; None: as a kernel knows it.
            additive: masks are added to the scores, in this type; None: they are boolean.
        """
        mask = full if full is None or additive is None else added(full, additive)
        return {"inputs_embeds": embeds, "attention_mask": self._mask_of_layers(mask), **more}

    def _mask_of_layers(self, full: Tensor | None) -> Any:
        """The mask as the model takes it."""
        return full

    def coordinates(self, positions: Tensor) -> Tensor:
        """Positions in the number of coordinates that the model takes: [R,N], or [3,R,N] under M-RoPE."""
        return positions[0] if positions.dim() == 3 else positions

    def logits(self, feature: Tensor) -> Tensor:
        """Scores [...,V] float32; minus infinity for ids that are never emitted."""
        scores = self.capped(self.model.lm_head(feature).to(self.device)).float()
        # Few ids are banned: a mask over the vocabulary would be read whole, for every row.
        return scores.index_fill_(-1, self._banned, float("-inf")) if len(self._banned) else scores

    def capped(self, scores: Tensor) -> Tensor:
        """The LM head's scores under the model's cap, where it has one."""
        return scores


def _pieces(length: int, step: int, queries: Tensor | None) -> Iterator[tuple[int, int, bool]]:
    """Yields chunks of at most `step` positions of a prompt, and whether the attention of the chunk is wanted."""
    wanted = torch.ones(length, dtype=torch.int8) if queries is None else queries.to("cpu", torch.int8)
    kinds, counts = torch.unique_consecutive(wanted, return_counts=True)
    first = 0
    for wants_attention, count in zip(kinds.tolist(), counts.tolist(), strict=True):
        most = min(step, _ATTENTION_CHUNK) if wants_attention and queries is not None else step
        for start in range(first, first + count, most):
            yield start, min(start + most, first + count), bool(wants_attention)
        first += count


def _joined(parts: Sequence[DecoderStates], length: int) -> DecoderStates:
    """Joins the passes over parts of a prompt into one."""
    weights: dict[int, Tensor] = {}
    with_attention = [part for part in parts if part.attention]
    places = sum(part.feature.shape[1] for part in with_attention)
    for part in with_attention:
        for layer, part_weights in part.attention.items():
            share = F.pad(part_weights, (0, length - part_weights.shape[-1])) * (part.feature.shape[1] / places)
            weights[layer] = weights[layer] + share if layer in weights else share
    layers = {layer: torch.cat([part.layers[layer] for part in parts], dim=1) for layer in parts[0].layers}
    return DecoderStates(torch.cat([part.feature for part in parts], dim=1), layers, weights)


def with_features(embeds: Tensor, modality: Tensor, features: Tensor) -> Tensor:
    """Embeddings [R,N,D] whose visual tokens hold `features` [P,D] in order."""
    places = modality != TEXT
    if places.device.type == "cpu":
        assert int(places.sum()) == len(features), f"{int(places.sum())} places for {len(features)} features"
    else:
        torch._assert_async(places.sum() == len(features))  # the host goes on, and the next read raises
    return embeds.masked_scatter(places.unsqueeze(-1), features.to(embeds))
