"""A frozen language model, with pictures or without, as a target: our positions, masks and cache.

Letters: R rows, B samples, T places, N nodes without the root, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.batch import Batch, Request
from ...core.errors import UserError
from ...core.pictures import TEXT
from ...core.states import Taps, TargetStates, feature_places, visual_places
from ..decoding.cache import Cache
from ..decoding.decoder import CachedDecoder, DecoderStates, PromptRows
from ..decoding.identical import Identical
from ..decoding.rows import Guidance
from ..decoding.tapped import end_attention, full_tensor, is_cut
from ..decoding.tree import Tree, upload_tree
from ..fast.cuda_graphs import Graphs
from ..hub import has_windows, rope_of
from ..packed_row import PackedRow
from .base import Prompt, TargetShape, TargetStep, check_layers, language_shape

# Rotations whose frequencies depend on the longest position beyond a length; transformers reads it on the host.
GROWING_ROTATIONS = {"dynamic", "longrope"}


@dataclass(frozen=True)
class EmbeddedPrompt:
    """A request as the model receives it, after its vision tower: what `prefill` runs, as often as it is asked to."""

    request: Request  # as the caller has it
    ids: Tensor  # [1,T], on the target's device
    modality: Tensor  # [1,T]
    rows: PromptRows


@dataclass
class LanguageSession:
    cache: Cache
    taps: Taps
    # How far positions run before places: M-RoPE's delta, which the prompt fixes for all that is decoded after it.
    rope_delta: int = 0
    visual: Tensor | None = None  # [T] bool: the prompt's visual tokens; None: it has none


class LanguageTarget:
    """Any decoder over one row. Raises as `check_model`.

    Args:
        num_token_ids: ids from here on have no token, as some rows of a table that is padded.
        prefill_chunk: places of a prompt that are run at once; None: all.
        settings: further ones of the decoder.
    """

    decoder_class: ClassVar[type[CachedDecoder]] = CachedDecoder

    def __init__(self, model: nn.Module, *, num_token_ids: int, prefill_chunk: int | None = None, **settings: Any):
        self.check_model(model)
        self.decoder = self.decoder_class(model, num_token_ids=num_token_ids, **settings)
        self.decoder.model.requires_grad_(False)
        self.prefill_chunk = prefill_chunk
        self.vocab_size = self.decoder.vocab_size
        self.identical: Identical | None = None  # of plain steps and verification; None: as kernels round
        self._embedding: tuple[Tensor, Tensor] | None = None  # the model's own, and the same as a whole

    @classmethod
    def check_model(cls, model: Any) -> None:
        """Raises `UserError` for a model that the family's decoder does not run exactly."""

    def view(self, request: Request) -> Request:
        """The request as the target reads it. Raises `UserError` where its pictures are not cut for it."""
        if request.pixels is not None and self.decoder.core is self.decoder.language_model:
            raise UserError(
                "the request has pictures and the target is a model of text alone",
                where=request.name,
                hint="use records without pictures, or a target that sees",
            )
        return request

    @property
    def device(self) -> torch.device:
        """The device of inputs and of the embedding."""
        return self.decoder.device

    @property
    def config(self) -> Any:
        """transformers' config of the language model."""
        return self.decoder.language_model.config

    @property
    def shape(self) -> TargetShape:
        """The language model's shape, which heads mirror."""
        return language_shape(self.config)

    @property
    def embedding(self) -> Tensor:
        """[V,D] of token ids."""
        weight = self.decoder.language_model.get_input_embeddings().weight
        if self._embedding is None or self._embedding[0] is not weight:
            self._embedding = weight, full_tensor(weight)  # gathered once from the ranks that hold its parts
        return self._embedding[1]

    @property
    def scores(self) -> Callable[[Tensor], Tensor]:
        """[...,D] -> [...,V] float32; minus infinity where no token may come."""
        return self.decoder.logits

    def score_parts(self, size: int) -> list[tuple[int, Callable[[Tensor], Tensor]]]:
        """`scores` of at most `size` neighbouring ids at a time: the first id of each part, and [...,D] -> [...,W].

        One part where the LM head is more than rows that can be read: it has a bias, is quantised, or is held elsewhere
        or by several ranks.
        """
        head, banned = self.decoder.model.lm_head, self.decoder.banned
        plain = type(head) is nn.Linear and head.bias is None and not is_cut(head.weight)
        if not plain or (head.weight.is_meta and self.device.type != "meta"):
            return [(0, self.scores)]
        parts: list[tuple[int, Callable[[Tensor], Tensor]]] = []
        for first in range(0, self.vocab_size, size):
            ids = slice(first, min(first + size, self.vocab_size))
            within = torch.tensor(
                [number - first for number in banned if first <= number < ids.stop], dtype=torch.int64
            )
            parts.append((first, partial(self._scores_of, ids, within.to(self.device))))
        return parts

    def _scores_of(self, ids: slice, banned: Tensor, feature: Tensor) -> Tensor:
        """`scores` of these ids alone; `banned` are numbers within them."""
        weight: Tensor = self.decoder.model.lm_head.weight
        scores = F.linear(feature.to(weight.device), weight[ids]).to(self.device)
        return self.decoder.capped(scores).float().index_fill_(-1, banned, float("-inf"))

    def guided(self, feature: Tensor, steps: Sequence[int]) -> Tensor:
        """[1,N,D] -> [N,V]: one row, nothing to guide."""
        return self.scores(feature[0])

    @torch.inference_mode()
    def embed_prompt(self, request: Request, *, encoded: Any = None) -> EmbeddedPrompt:
        """Run the tower over the request's pictures. What it holds is as large as the prompt: [1,T,D], and [n,D] for
        each layer after which Qwen3-VL adds visual states. `encoded`: what the decoder's `see` made of pictures, which
        then stand in the place of the request's; None: the tower runs.
        """
        view = self.view(request)
        on_device = view.to(self.device)
        ids, modality = on_device.ids[None], on_device.modality[None]
        rows = self.decoder.prompts(
            ids, modality, on_device.pixels, on_device.pictures, encoded=encoded,
            on_host=(view.modality[None].cpu(), None),
        )  # fmt: skip
        return EmbeddedPrompt(request, ids, modality, rows)

    @property
    def graphs(self) -> Graphs | None:
        """The CUDA graphs of its passes."""
        return self.decoder.graphs

    @torch.inference_mode()
    def prefill(
        self, request: Request, taps: Taps, *, capacity: int, embedded: EmbeddedPrompt | None = None
    ) -> tuple[LanguageSession, TargetStep]:
        """Run the prompt, which at most `capacity` tokens may follow, drafted ones included.

        Raises `UserError` where the text may grow longer than the target's rotations are fixed for.
        """
        self._check_length(len(request.ids) + capacity, request.name)
        embedded = self.embed_prompt(request) if embedded is None else embedded
        assert embedded.request is request, "embedded for another request, whose pictures may be others"
        ids, modality, prompts = embedded.ids, embedded.modality, embedded.rows
        visual = modality[0] != TEXT if request.pixels is not None else None
        places = ids.shape[1] + capacity
        if self.identical is not None:  # whole blocks, behind what fills up the last pass
            places = self.identical.sizes(places, 1)[1]
        session = LanguageSession(self.decoder.request_cache(places), taps, prompts.rope_delta, visual)
        states = self.decoder.run(
            prompts,
            session.cache,
            layers=taps.layers,
            attention=taps.prefill_attention,
            queries=_queries(modality[0], taps.attention_queries) if taps.prefill_attention else None,
            chunk=self.prefill_chunk,
        )
        positions = prompts.positions if len(prompts.positions) == 3 else prompts.positions[0]
        mask = torch.ones_like(ids, dtype=torch.bool)
        return session, TargetStep(
            self.decoder.logits(states.feature[0, -1:]),
            states.feature if taps.feature else None,
            states.layers,
            states.attention,
            Prompt(ids, mask, positions, Guidance(), modality),
            prompts,
        )

    @torch.inference_mode()
    def verify(self, session: LanguageSession, root: int, tree: Tree) -> TargetStep:
        # A node's position is alike in all coordinates.
        first = session.cache.length + session.rope_delta
        ids, positions, mask = upload_tree(self.device, tree, root, first, always_mask=False)
        states = (self.identical or self.decoder).forward(
            self.decoder.embed(ids[None]), session.cache, positions[None], mask, layers=session.taps.layers
        )
        scores = self.decoder.logits(states.feature[0])
        feature = states.feature if session.taps.feature else None
        return TargetStep(scores, feature, states.layers).along(range(len(ids)))  # without what fills up the pass

    @torch.inference_mode()
    def commit(self, session: LanguageSession, path: Sequence[int]) -> None:
        session.cache.commit([0, *(node + 1 for node in path)])

    def watched(self, taps: Taps) -> Taps:
        """`taps` with what `visual_attention` reads. Raises `UserError` for a model that does not tell it."""
        language_model = self.decoder.language_model
        if not hasattr(language_model.layers[-1], "self_attn") or has_windows(language_model.config):
            raise UserError(
                "this target's last layer has no attention over all places, whose share on the picture could be read",
                key="visual_skip",
                hint="leave visual_skip out for it: ViSkip is for LLaVA, Qwen-VL and other decoders of Llama's kind",
            )
        return replace(taps, text_layers=tuple(sorted({*taps.text_layers, self.decoder.num_layers - 1})))

    @torch.inference_mode()
    def visual_attention(self, session: LanguageSession, step: TargetStep) -> float:
        """Share of its attention that the last committed place, where `step` ends, gives to the prompt's visual tokens,
        in the last layer, the mean over heads: how much the token after it hangs on the picture. 0 where it has none.
        """
        if session.visual is None:
            return 0.0
        decoder, place = self.decoder, session.cache.length - 1 + session.rope_delta
        state = step.layers[decoder.num_layers - 1][:, -1:]
        places = decoder.coordinates(torch.full((1, 1), place, device=state.device))
        weights = end_attention(decoder.language_model, state, session.cache, places)
        return float(weights[:, : len(session.visual)][:, session.visual.to(weights.device)].sum(-1).mean())

    # No inference mode: the backward pass of a head cannot use tensors that were created in it.
    @torch.no_grad()
    def states(self, batch: Batch, taps: Taps) -> TargetStates:
        """One teacher-forced pass over `batch` (right padded) as `prefill` runs a prompt; what is not kept is zero."""
        self.check(taps)
        self._check_length(batch.ids.shape[1])
        batch = batch.to(self.decoder.device)
        mask, real = batch.attention_mask, None
        if batch.pixels is not None and len(batch.pixels) > batch.num_dummy_images:
            real = batch.pixels[: len(batch.pixels) - batch.num_dummy_images]
        on_host = batch.on_host("modality"), batch.on_host("attention_mask")
        prompts = self.decoder.prompts(batch.ids, batch.modality, real, batch.pictures, mask=mask, on_host=on_host)
        row = PackedRow.of(on_host[1], mask.device) if batch.packed else None
        states = self._run(prompts, row, taps)
        feature = states.feature if taps.feature else None
        return tapped_states(batch, taps, feature, states.layers, prompts.positions)

    def _check_length(self, places: int, name: str | None = None) -> None:
        """Raises `UserError` for a text that is longer than the target's rotations are fixed for."""
        rope, most = rope_of(self.config), self.decoder.max_positions
        kind = rope.get("rope_type") or rope.get("type")
        if kind == "longrope":
            most = rope.get("original_max_position_embeddings") or most
        if kind in GROWING_ROTATIONS and most is not None and places > most:
            raise UserError(
                f"prompt and answer may take {places:,} places, and this target's rotations ({kind}) change with the "
                f"length of the text beyond {most:,}, while keys in a cache stay as they were turned",
                where=name, hint=f"shorten the prompt or the answer to {most:,} places together",
            )  # fmt: skip

    def _run(self, prompts: PromptRows, row: PackedRow | None, taps: Taps) -> DecoderStates:
        """States [B,T,D] of a batch's prompts, padded or in one packed row."""
        # Padding is on the right, so a causal pass never attends to it.
        prompts = replace(prompts, mask=None)
        if row is not None:  # the samples in one row, each with the positions that it has alone
            prompts = replace(
                prompts, row=row, embeds=row.pack(prompts.embeds),
                positions=torch.stack([row.pack(part) for part in prompts.positions]),
                visual=None if prompts.visual is None else prompts.visual[row.real][None],
                blocks=None if prompts.blocks is None else row.pack(prompts.blocks),
            )  # fmt: skip
        cache = self.decoder.new_cache(prompts.embeds.shape[1])
        states = self.decoder.run(prompts, cache, layers=taps.layers, chunk=self.prefill_chunk)
        if row is None:
            return states
        layers = {layer: row.spread(part) for layer, part in states.layers.items()}
        return replace(states, feature=row.spread(states.feature), layers=layers)

    def check(self, taps: Taps) -> None:
        """Raises `UserError` for layers that do not exist, or whose visual states differ from the next layer's
        input.
        """
        check_layers(taps, self.decoder.num_layers)
        deepstack = self.decoder.num_deepstack
        if early := [layer for layer in taps.visual_layers if 1 <= layer <= deepstack]:
            raise UserError(
                f"visual states after layer {early[0]} are wanted, and Qwen3-VL adds to them what its tower saw after "
                f"each of its first {deepstack} layers: a tap there and the next layer's input are two things",
                hint=f"tap visual tokens above layer {deepstack} (half of the layers is usual), or at 0, the embedding",
            )


def tapped_states(
    batch: Batch, taps: Taps, feature: Tensor | None, layers: Mapping[int, Tensor], positions: Tensor
) -> TargetStates:
    """States [B,T,D] at the places that `taps` asks for, zero elsewhere."""
    mask = batch.attention_mask
    text = feature_places(batch.modality, mask, batch.loss_mask, taps.everywhere)
    visual = visual_places(batch.modality, mask)
    only = lambda states, places: states.masked_fill(~places.unsqueeze(-1), 0)  # noqa: E731
    by_layer = {layer: torch.zeros_like(mask) for layer in taps.layers}
    for layer in taps.text_layers:
        by_layer[layer] = by_layer[layer] | text
    for layer in taps.visual_layers:
        by_layer[layer] = by_layer[layer] | visual
    return TargetStates(
        feature=only(feature, text) if feature is not None and taps.feature else None,
        layers={layer: only(layers[layer], places) for layer, places in by_layer.items()},
        positions=positions,
    )


def _queries(modality: Tensor, which: Literal["suffix", "text", "last"]) -> Tensor:
    """[T] bool: the places whose attention is averaged."""
    visual, places = modality != TEXT, torch.arange(len(modality), device=modality.device)
    if which == "text":
        return ~visual
    first = len(modality) - 1 if which == "last" else (int(visual.nonzero()[-1]) + 1 if visual.any() else 0)
    return places >= first
