"""The one decoder layer that heads are made of: a target's layer, with the differences that EAGLE's heads have.

Parameter names are those of the published checkpoints (`self_attn.q_proj`, `mlp.gate_proj`, ...).
Letters: R rows, N new positions, K places seen, D width, H heads, G key-value heads, E head width.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import attend
from ..layer import HeadNorm, LayerShape, RMSNorm, rotate_halves, rotate_pairs
from ..training_passes import TrainingPasses
from . import unwrapped
from .cache import Cache


class DecoderLayer(nn.Module):
    """Attention and a gated feed-forward, each with a residual."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.self_attn = HeadAttention(shape)
        self.mlp = GatedFeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps) if shape.input_norm else nn.Identity()
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(
        self, states: Tensor, rope: Tensor, mask: Tensor | None, cache: Cache | TrainingPasses | None
    ) -> Tensor:
        """states [R,N,D], mask [N,K] or [R,N,K] bool; None: one position sees all, several are causal with nothing
        before them, or what `TrainingPasses` says.
        """
        return through(self, states, self.input_layernorm(states), rope, mask, cache)


def through(
    layer: Any, states: Tensor, inputs: Any, rope: Tensor, mask: Tensor | None, cache: Cache | TrainingPasses | None
) -> Tensor:
    """States [R,N,D] after a layer whose attention reads `inputs` [R,N,...]; the rest as of `DecoderLayer.forward`."""
    attention, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
    plain = unwrapped.head_layer_of(attention, mlp, norm) if isinstance(cache, Cache) else None
    if plain is not None:
        assert isinstance(cache, Cache)
        turn = partial(attention.turn, rope=rope)
        return unwrapped.step(plain, states, inputs, turn, for_heads(mask), cache.own_layers[0])
    states = states + attention(inputs, rope, mask, cache)
    return states + mlp(norm(states))


def for_heads(mask: Tensor | None) -> Tensor | None:
    """[N,K] as it is, [R,N,K] as [R,1,N,K]."""
    return mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask


class HeadAttention(nn.Module):
    """Self-attention of Llama's layout, with the biases and norms that the shape names."""

    unwrapped_as = "HeadAttention"
    projection: ClassVar[type[nn.Linear]] = nn.Linear  # of queries, keys and values

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.shape = shape
        width, inner, shared = shape.attention_input or shape.hidden_size, shape.num_heads, shape.num_kv_heads
        self.q_proj = self.projection(width, inner * shape.head_dim, bias=shape.qkv_bias)
        self.k_proj = self.projection(width, shared * shape.head_dim, bias=shape.qkv_bias)
        self.v_proj = self.projection(width, shared * shape.head_dim, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(inner * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = _head_norm(shape, inner), _head_norm(shape, shared)

    def turn(self, heads: Tensor, rope: Tensor) -> Tensor:
        """Heads [R,N,H,E] turned by `rope`, as of `DecoderLayer.forward`."""
        return (rotate_pairs if self.shape.rope == "grid" else rotate_halves)(heads, rope)

    def projected(self, states: Any, cache: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [R,N,H*E], keys and values [R,N,G*E] of what `forward` is given."""
        return self.q_proj(states), self.k_proj(states), self.v_proj(states)

    def forward(
        self, states: Tensor, rope: Tensor, mask: Tensor | None, cache: Cache | TrainingPasses | None
    ) -> Tensor:
        """States [R,N,D] -> [R,N,D]; arguments as in `DecoderLayer.forward`."""
        shape = self.shape
        read, keys, values = self.projected(states, cache)
        q = self.q_norm(read.unflatten(-1, (shape.num_heads, shape.head_dim)))  # [R,N,H,E]
        k = self.k_norm(keys.unflatten(-1, (shape.num_kv_heads, shape.head_dim)))
        v = values.unflatten(-1, (shape.num_kv_heads, shape.head_dim)).transpose(1, 2)
        # At once: small models wait for the calls, not for the numbers.
        q, k = (
            self.turn(torch.cat([q, k], dim=2), rope)
            .transpose(1, 2)
            .split([shape.num_heads, shape.num_kv_heads], dim=1)
        )
        if isinstance(cache, TrainingPasses):
            assert mask is None, "passes of training know what they see"
            return self.o_proj(cache.attend(q, k, v).transpose(1, 2).flatten(2))
        if cache is not None:
            k, v = cache.own_layers[0].update(k, v)
        mixed = attend(q, k, v, for_heads(mask))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def _head_norm(shape: LayerShape, heads: int) -> nn.Module:
    if shape.qk_rms_norm:
        return RMSNorm(shape.head_dim, shape.norm_eps)
    return HeadNorm(heads, shape.head_dim) if shape.qk_norm else nn.Identity()


class GatedFeedForward(nn.Module):
    """SwiGLU."""

    unwrapped_as = "GatedFeedForward"

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[...,D] -> [...,D]."""
        return self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))
