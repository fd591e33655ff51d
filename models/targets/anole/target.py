"""Anole as a target: transformers' Chameleon 7B, whose image logits it hides, with and without the text in one batch.

One vocabulary holds text and image codes (id = code + 4). The stock forward overwrites the scores of all image codes,
so the LM head is applied here, to the state after the final norm; rows are guided first, and only then is everything
but image codes forbidden (LANTERN's order). Its published samplers differ: see `AnoleTargetConfig.cfg_scale`.
Letters: R rows (1, or 2 under guidance), N nodes with the root, B samples, T places, n image tokens, D width, V ids.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ....core.batch import CodeBatch, ImageRequest
from ....core.errors import UserError
from ....core.states import Taps, TargetStates
from ...attention import causal_among
from ...decoding.decoder import CachedDecoder, DecoderStates
from ...decoding.rows import Guidance
from ...decoding.tapped import tapped
from ...layer import LayerShape
from ..base import Prompt, TargetShape
from ..guided import DrawingSession, GuidedTarget

if TYPE_CHECKING:
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

DEFAULT_GUIDANCE = Guidance(3.0)

# ---- ids


@dataclass(frozen=True)
class AnoleIds:
    """The ids that prompts and masks are made of; the defaults are the published tokenizer's.

    The config's own `bos_token_id` (1) is the padding and not what prompts begin with.
    """

    bos: int = 0
    pad: int = 1
    end_of_image: int = 8196
    begin_of_image: int = 8197
    end_of_turn: int = 8710
    first_image: int = 4
    num_codes: int = 8192


_NAMES = {
    "bos": "<s>",
    "pad": "<pad>",
    "end_of_image": "<eoss>",
    "begin_of_image": "<racm3:break>",
    "end_of_turn": "<reserved08706>",
}
# A code's name spells its digits as letters, A for 0: IMGIMGBCZ is code 12.
_CODE_NAME = re.compile(r"IMGIMG([A-J]+)Z")
_DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")


def read_ids(config: ChameleonConfig) -> AnoleIds:
    """Ids by name from the config's `vocabulary_map`; markers that it does not name are the published. Raises
    `UserError`: an id is outside the model's vocabulary, or an image code's id is not code + 4, which the codes of
    every published file and the neighbour tables of LANTERN count on.
    """
    hint = "give the config.json of leloy/Anole-7b-v0.1-hf or facebook/chameleon-7b"
    vocabulary: dict[str, int] = {**(config.vocabulary_map or {})}
    numbers = {int(m[1].translate(_DIGITS)): number for name, number in vocabulary.items()
             if (m := _CODE_NAME.fullmatch(name))}  # fmt: skip
    if not numbers:
        raise UserError("the vocabulary names no image code (IMGIMGAZ is code 0)", hint=hint)
    first = AnoleIds.first_image
    for code in range(len(numbers)):
        if numbers.get(code) != code + first:
            problem = f"image code {code} has id {numbers.get(code, 'none')}, expected {code + first} (code + {first})"
            raise UserError(problem, hint=hint)
    named = {field: vocabulary[name] for field, name in _NAMES.items() if name in vocabulary}
    ids = AnoleIds(**named, num_codes=len(numbers))
    outside = [f"{name} {number}" for name, number in asdict(ids).items() if number >= config.vocab_size]
    if outside or first + ids.num_codes > config.vocab_size:
        problem = f"ids outside the model's {config.vocab_size}: {', '.join(outside) or 'image codes'}"
        raise UserError(problem, hint=hint)
    return ids


# ---- the target


class AnoleTarget(GuidedTarget):
    """Frozen. A request's `condition` is the text's ids [n], without special ones.

    A drafter that shares the LM head gets its scores from `scores` (each row's own, nothing forbidden) and what is
    decoded from out of `guided`, which forbids the same ids for target and drafter; `forbid` does that alone.

    Args:
        num_image_tokens: of an image; a square.
    """

    kind: ClassVar[str] = "anole"  # of its section

    def __init__(
        self,
        model: ChameleonForConditionalGeneration,
        guidance: Guidance = DEFAULT_GUIDANCE,
        *,
        num_image_tokens: int = 1024,
    ):
        self.ids = read_ids(model.config)
        self.model = model.requires_grad_(False)
        self.decoder = CachedDecoder(model, num_token_ids=model.config.vocab_size)
        self.guidance, self.num_layers = guidance, self.decoder.num_layers
        self.vocab_size: int = model.config.vocab_size
        self.num_codes, self.grid = num_image_tokens, math.isqrt(num_image_tokens)
        assert self.grid**2 == num_image_tokens, num_image_tokens
        places = torch.arange(self.vocab_size, device=self.device) - self.ids.first_image
        self._forbidden = (places < 0) | (places >= self.ids.num_codes)  # [V]

    @property
    def config(self) -> ChameleonConfig:
        return self.model.config

    @property
    def shape(self) -> TargetShape:
        """The shape that heads mirror: sizes, a layer of Chameleon's, and the grid of codes."""
        return anole_shape(self.config, self.grid)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def embedding(self) -> Tensor:
        return self.model.model.embed_tokens.weight

    def scores(self, feature: Tensor) -> Tensor:
        """[...,D] -> [...,V] float32, each row's own, text and image alike."""
        return self.model.lm_head(feature).float()

    def forbid(self, scores: Tensor) -> Tensor:
        """[...,V] with minus infinity for all that is no image code."""
        return scores.masked_fill(self._forbidden.to(scores.device), float("-inf"))

    def guided(self, feature: Tensor, steps: Sequence[int]) -> Tensor:
        return self.forbid(self.guidance(self.scores(feature), steps))

    def codes(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens) - self.ids.first_image

    def _prompts(
        self, requests: Sequence[ImageRequest], taps: Taps, capacity: int
    ) -> tuple[DrawingSession, DecoderStates]:
        markers = {getattr(self.ids, name) for name in _NAMES}
        for request in requests:
            if special := sorted({*request.condition.tolist()} & markers):
                raise UserError(
                    f"the text's ids hold special ones ({', '.join(map(str, special))}), which the target adds itself",
                    hint="tokenize prompts with add_special_tokens=False",
                )
        ids, mask, positions = self._rows(*self._both(requests))
        length = ids.shape[1]
        cache = self.decoder.new_cache(length + capacity)
        states = self.decoder.forward(
            self.decoder.embed(ids), cache, positions, causal_among(mask), layers=taps.layers,
            attention=taps.prefill_attention,
        )  # fmt: skip
        cache.advance(length)
        return DrawingSession(cache, taps, Prompt(ids, mask, positions, self.guidance), mask), states

    def _at(self, session: DrawingSession, ids: Tensor, places: Tensor, mask: Tensor | None) -> DecoderStates:
        # Every row counts from its own last prompt token.
        positions = session.prompt.positions[:, -1:] + (places - (session.prompt.ids.shape[1] - 1))
        embeds = self.decoder.embed(ids)
        return self.decoder.forward(embeds, session.cache, positions, mask, layers=session.taps.layers)

    def _states(self, batch: CodeBatch, uncond: Tensor, layers: Sequence[int]) -> TargetStates:
        """States of padding are zero."""
        ids, mask, positions = self._rows(batch.conditions, uncond, batch.codes + self.ids.first_image)
        dtype = self.embedding.dtype
        added = torch.zeros(1, dtype=dtype, device=self.device).where(causal_among(mask), torch.finfo(dtype).min)
        with tapped(self.decoder.language_model, layers, ()) as (states, _):
            output = self.model.model(
                input_ids=ids, attention_mask=added[:, None], position_ids=positions, use_cache=False
            )
        if 0 in layers:
            states[0] = self.decoder.embed(ids)
        padding_places = ~mask[..., None]
        feature = output.last_hidden_state.masked_fill(padding_places, 0.0)
        by_layer = {layer: s.to(feature.device).masked_fill(padding_places, 0.0) for layer, s in states.items()}
        longest = max(len(text) for text in batch.conditions)
        padding = tuple(longest - len(text) for text in batch.conditions)
        return TargetStates(
            feature, by_layer, positions[None], ids=ids, mask=mask, num_generated=batch.codes.shape[1], padding=padding
        )

    def _rows(
        self, texts: Sequence[Tensor], uncond: Tensor, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, mask and positions [B,T] of prompts with the image tokens [B,n] that follow, padded on the left.

        A row without its text (`uncond` [B]) is begin-of-text and begin-of-image; every row's positions count from
        its own start.
        """
        ids = self.ids
        tokens = uncond.new_empty(len(texts), 0, dtype=torch.int64) if tokens is None else tokens
        whole = [
            torch.cat([t.new_tensor([ids.bos]), t, t.new_tensor([ids.end_of_turn, ids.begin_of_image]), follow])
            for t, follow in zip(texts, tokens, strict=True)
        ]
        length = max(len(row) for row in whole)
        padded = torch.stack([F.pad(row, (length - len(row), 0), value=ids.pad) for row in whole])
        starts = torch.tensor([length - len(row) for row in whole], device=self.device)
        starts = starts.where(~uncond, length - tokens.shape[1] - 2)
        places = torch.arange(length, device=self.device) - starts[:, None]
        padded = padded.masked_fill(places < 0, ids.pad).masked_fill(places == 0, ids.bos)
        return padded, places >= 0, places.clamp(min=0)


def anole_shape(config: ChameleonConfig, grid: int = 32) -> TargetShape:
    """The shape that heads mirror: a layer of Chameleon's, with its norms of queries and keys."""
    rope = config.rope_parameters or {}
    layer = LayerShape(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=config.intermediate_size, norm_eps=config.rms_norm_eps, rope="half",
        rope_theta=float(rope.get("rope_theta") or 10000.0), input_norm=True, qk_norm=True,
    )  # fmt: skip
    sizes = config.vocab_size, config.hidden_size, config.num_hidden_layers
    return TargetShape(*sizes, layer=layer, grid=grid, condition="text")
