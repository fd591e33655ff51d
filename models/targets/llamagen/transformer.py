"""LlamaGen's decoder: condition vectors, then image codes in raster order (Sun et al. 2024).

Parameters carry the official names, so that the published files load as they are. What a reader would not expect: the
rotary table is zero in cosine *and* sine at condition positions, so their queries and keys vanish.
Letters: R rows, N new positions, C condition tokens, T = C + n places, n image codes, D width, H heads, E head width,
V codes, K places seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from ....core.section import Section
from ....core.states import uploaded
from ...attention import attend, causal_among, hidden_below
from ...decoding.cache import Cache
from ...decoding.decoder import DecoderStates
from ...decoding.head_layer import RMSNorm, for_heads, rope_table, rotate_pairs

# name -> (layers, heads, width): the published sizes.
SIZES: dict[str, tuple[int, int, int]] = {
    "B": (12, 12, 768),
    "L": (24, 16, 1024),
    "XL": (36, 20, 1280),
    "XXL": (48, 24, 1536),
    "XXXL": (48, 40, 2560),
    "1B": (22, 32, 2048),
    "3B": (24, 32, 3200),
    "7B": (32, 32, 4096),
}


class LlamaGenConfig(Section):
    """The shape of a LlamaGen. `size` names a published one; tiny ones give their numbers."""

    # Transformer layers.
    num_layers: int = Field(ge=1, le=1000)
    # Attention heads of each layer.
    num_heads: int = Field(ge=1, le=4096)
    # Width of the hidden states.
    dim: int = Field(ge=4, le=1 << 20)
    # Null: two thirds of 4 x dim, up to the next multiple of 256, as published.
    ffn_hidden: int | None = Field(None, ge=1)
    # Codes of the image tokenizer.
    vocab_size: int = Field(16384, ge=2)
    # Codes along one side of the image: 16 for 256 pixels, 24 for 384, 32 for 512.
    grid: int = Field(16, ge=1)
    # What the image is asked for by: one class label, or a caption's features.
    condition: Literal["class", "text"] = "text"
    # Class-conditional: number of classes.
    num_classes: int = Field(1000, ge=1)
    # Text-conditional: width of the text encoder's features.
    caption_dim: int = Field(2048, ge=1)
    # Places that a caption takes; a class takes one.
    caption_slots: int = Field(120, ge=1)
    # Of its norms.
    norm_eps: float = Field(1e-5, gt=0, le=1)
    # Base of the two-dimensional rotary positions.
    rope_base: float = Field(10000.0, ge=1, le=1e12)
    # Standard deviation of initial weights; small models learn sooner from larger ones.
    init_std: float = Field(0.02, gt=0)
    # Training only: of embedded tokens, of residual branches and of the feed-forward (the published recipe has 0.1).
    dropout: float = Field(0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _even(self) -> LlamaGenConfig:
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 4:
            raise ValueError("dim / num_heads must be a multiple of 4: the rotary table has pairs for rows and columns")
        return self

    @property
    def num_condition_tokens(self) -> int:
        """Positions that the condition takes before the first code."""
        return 1 if self.condition == "class" else self.caption_slots

    @property
    def num_codes(self) -> int:
        """Tokens of an image."""
        return self.grid * self.grid

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.dim // self.num_heads

    @property
    def hidden(self) -> int:
        """Width of the feed-forward."""
        return self.ffn_hidden or -(-int(2 * 4 * self.dim / 3) // 256) * 256


def published(size: str, **values: object) -> LlamaGenConfig:
    """The config of a published size (a key of `SIZES`)."""
    layers, heads, dim = SIZES[size]
    return LlamaGenConfig(num_layers=layers, num_heads=heads, dim=dim, **values)


class LlamaGen(nn.Module):
    """The whole model. `decode` is the cached forward of the loop, `states` the teacher-forced one."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.cls_embedding: LabelEmbedding | CaptionEmbedding = (
            LabelEmbedding(config) if config.condition == "class" else CaptionEmbedding(config)
        )
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        # No buffer: it stays float32 when the weights become bfloat16.
        self._rope = rope_table(
            config.grid, config.head_dim, config.rope_base, zeros_before=config.num_condition_tokens
        )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Random weights as published: N(0, init_std), the output matrix zero, norms one."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            elif name == "output.weight":
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=self.config.init_std, generator=generator)
        if isinstance(self.cls_embedding, CaptionEmbedding):
            nn.init.normal_(self.cls_embedding.uncond_embedding, std=self.config.caption_dim**-0.5, generator=generator)

    def rope(self, device: torch.device) -> Tensor:
        """The rotary table [C+n+10,E/2,2] float32."""
        if self._rope.device != device:
            self._rope = self._rope.to(device)
        return self._rope

    def decode(
        self,
        embeds: Tensor,
        cache: Cache | None,
        positions: Tensor,
        mask: Tensor | None,
        *,
        layers: Sequence[int] = (),
    ) -> DecoderStates:
        """Run N new positions [R,N,D] after the cache's committed ones (the caller commits).

        Args:
            positions: [N] or [R,N] int64, counted over condition tokens and codes.
            mask: [N,K], [R,N,K] bool over past and new places; True is seen. None: a single position sees all,
                several are causal with nothing before them.
        """
        rope = self.rope(embeds.device)[positions]  # [N,E/2,2] or [R,N,E/2,2]
        visible = for_heads(mask)
        if visible is not None and cache is not None:
            visible = hidden_below(visible, embeds.dtype)  # once, and not in each layer's attention
        by_layer = {0: embeds} if 0 in layers else {}
        states = embeds
        for number, block in enumerate(self.layers):
            states = block(states, rope, visible, cache, number)
            if number + 1 in layers:
                by_layer[number + 1] = states
        return DecoderStates(self.norm(states), by_layer, {})

    def conditioned(self, conditions: Sequence[Tensor], uncond: Tensor) -> tuple[Tensor, Tensor | None]:
        """Embedded condition tokens [B,C,D], and which of them are seen [B,C] bool; None: all.

        Args:
            conditions: of each row a label [] or a caption's features [n,F].
            uncond: [B] bool: rows that lose their condition; they keep the caption's mask, as in sampling.
        """
        if self.config.condition == "class":
            return self.cls_embedding(torch.stack([*conditions]), uncond), None
        features, mask = pad_left(conditions, self.config.num_condition_tokens)
        return self.cls_embedding(features, uncond), mask

    def states(
        self, condition: Tensor, codes: Tensor, condition_mask: Tensor | None = None, *, kept: Tensor | None = None,
        layers: Sequence[int] = (),
    ) -> DecoderStates:  # fmt: skip
        """States of whole sequences.

        Args:
            condition: [B,C,D] embedded condition tokens.
            codes: [B,n] int64.
            condition_mask: [B,C] bool: condition tokens that are seen. A token always sees itself.
            kept: [B,n] bool: codes that are read; zeros stand in the others' places. None: all.
        """
        read = self.tok_embeddings(codes)
        embeds = torch.cat([condition, read if kept is None else read * kept[..., None]], dim=1)
        states = F.dropout(embeds, self.config.dropout, self.training)
        length = embeds.shape[1]
        positions = torch.arange(length, device=embeds.device)
        mask = None if condition_mask is None else sequence_mask(length, condition_mask, embeds.device)
        return self.decode(states, None, positions, mask, layers=layers)


def sequence_mask(length: int, condition_mask: Tensor | None, device: torch.device) -> Tensor:
    """[T,T] or [B,T,T] bool: causal, without the padded condition tokens, but with the diagonal."""
    if condition_mask is None:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal_among(F.pad(condition_mask, (0, length - condition_mask.shape[1]), value=True))


class LabelEmbedding(nn.Module):
    """A class label's vector; the last row is the unconditional class."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.dim)
        self.num_classes = config.num_classes

    def forward(self, labels: Tensor, uncond: Tensor) -> Tensor:
        """labels [B], uncond [B] bool -> [B,1,D]."""
        return self.embedding_table(torch.where(uncond, self.num_classes, labels))[:, None]


class CaptionEmbedding(nn.Module):
    """A caption's features, projected token by token. The unconditional features go through the same projection.

    They are a buffer: drawn once, never trained, and saved with the weights.
    """

    uncond_embedding: Tensor

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.register_buffer("uncond_embedding", torch.zeros(config.caption_slots, config.caption_dim))
        self.cap_proj = CaptionProjection(config)

    def forward(self, features: Tensor, uncond: Tensor) -> Tensor:
        """features [B,C,F] of any type, left padded with zeros, uncond [B] bool -> [B,C,D]."""
        dtype = self.cap_proj.fc1.weight.dtype  # a published encoder's features are bfloat16
        chosen = torch.where(uncond[:, None, None], self.uncond_embedding.to(dtype), features.to(dtype))
        return self.cap_proj(chosen)


class CaptionProjection(nn.Module):
    """Two linear layers with GELU between them: caption features to the transformer's width."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.caption_dim, config.dim, bias=False)
        self.fc2 = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """[B,C,F] -> [B,C,D]."""
        return self.fc2(F.gelu(self.fc1(features), approximate="tanh"))


def pad_left(features: Sequence[Tensor], num_tokens: int) -> tuple[Tensor, Tensor]:
    """Unpadded caption features, each [n,F], to [B,C,F] with zeros in front, and their mask [B,C] bool.

    Features beyond `num_tokens` are cut, as the text encoder's own truncation does.
    """
    cut = [f[:num_tokens] for f in features]
    padded = torch.stack([F.pad(f, (0, 0, num_tokens - len(f), 0)) for f in cut])
    places = torch.arange(num_tokens)
    mask = torch.stack([places >= num_tokens - len(f) for f in cut])
    return padded, uploaded(mask, padded.device)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.dropout = config.dropout

    def forward(self, states: Tensor, rope: Tensor, mask: Tensor | None, cache: Cache | None, layer: int) -> Tensor:
        """States [R,N,D] -> [R,N,D]; arguments as in `Attention.forward`."""
        mixed = self.attention(self.attention_norm(states), rope, mask, cache, layer)
        states = states + F.dropout(mixed, self.dropout, self.training)
        return states + F.dropout(self.feed_forward(self.ffn_norm(states)), self.dropout, self.training)


class Attention(nn.Module):
    """Multi-head self-attention with rotary positions of a grid."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, states: Tensor, rope: Tensor, mask: Tensor | None, cache: Cache | None, layer: int) -> Tensor:
        """States [R,N,D] -> [R,N,D].

        Args:
            rope: [N,E/2,2] or [R,N,E/2,2], see `rope_table`.
            mask: bool, broadcast to [R,H,N,P+N]; None as of `decode`.
            cache: holds the P positions before; None: there are none.
            layer: of the cache.
        """
        rows, count, width = states.shape
        # Queries and keys are turned at once: small models wait for the calls, not for the numbers.
        both, v = (
            self.wqkv(states).unflatten(-1, (-1, self.head_dim)).split([2 * self.num_heads, self.num_heads], dim=2)
        )
        q, k = rotate_pairs(both, rope).transpose(1, 2).chunk(2, dim=1)  # [R,H,N,E]
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.kv_layers[layer].update(k, v)
        mixed = attend(q, k, v, mask)
        return self.wo(mixed.transpose(1, 2).reshape(rows, count, width))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[...,D] -> [...,D]."""
        return self.w2(F.silu(self.w1(states)) * self.w3(states))
