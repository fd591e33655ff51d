"""The one decoder layer that heads are made of: a target's layer, with the differences that EAGLE's heads have.

Parameter names are those of the published checkpoints (`self_attn.q_proj`, `mlp.gate_proj`, ...).
Letters: R rows, N new positions, K places seen, D width, H heads, G key-value heads, E head width.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..decoding.cache import Cache
from ..llamagen.transformer import RMSNorm, rope_table, rotate_pairs


@dataclass(frozen=True)
class LayerShape:
    """What the layer mirrors of its target."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    norm_eps: float
    # "grid": LlamaGen's interleaved rotation by rows and columns; "half": the halves of a head turn together (Llama).
    rope: Literal["grid", "half"] = "half"
    rope_theta: float = 10000.0
    # grid: codes along a side, and positions before the first code whose rotation is zero.
    grid: int = 0
    zeros_before: int = 0
    # A norm before the attention: EAGLE leaves it out where features are already normed; Anole's head keeps it.
    input_norm: bool = False
    # Chameleon's layer norm of queries and keys, with a gain and bias for each head.
    qk_norm: bool = False
    # Whether padded places of the prompt are hidden. LANTERN's LlamaGen heads see them, in training and decoding.
    mask_padding: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class DecoderLayer(nn.Module):
    """Attention and a gated feed-forward, each with a residual."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.self_attn = HeadAttention(shape)
        self.mlp = GatedFeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps) if shape.input_norm else nn.Identity()
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, states: Tensor, rope: Tensor, mask: Tensor, cache: Cache | None) -> Tensor:
        """states [R,N,D], mask [N,K] or [R,N,K] bool."""
        states = states + self.self_attn(self.input_layernorm(states), rope, mask, cache)
        return states + self.mlp(self.post_attention_layernorm(states))


class HeadAttention(nn.Module):
    def __init__(self, shape: LayerShape):
        super().__init__()
        self.shape = shape
        width, inner, shared = shape.hidden_size, shape.num_heads, shape.num_kv_heads
        self.q_proj = nn.Linear(width, inner * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shared * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shared * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(inner * shape.head_dim, width, bias=False)
        self.q_norm = HeadNorm(inner, shape.head_dim) if shape.qk_norm else nn.Identity()
        self.k_norm = HeadNorm(shared, shape.head_dim) if shape.qk_norm else nn.Identity()

    def forward(self, states: Tensor, rope: Tensor, mask: Tensor, cache: Cache | None) -> Tensor:
        shape = self.shape
        q = self.q_norm(self.q_proj(states).unflatten(-1, (shape.num_heads, shape.head_dim)))  # [R,N,H,E]
        k = self.k_norm(self.k_proj(states).unflatten(-1, (shape.num_kv_heads, shape.head_dim)))
        v = self.v_proj(states).unflatten(-1, (shape.num_kv_heads, shape.head_dim)).transpose(1, 2)
        turn = rotate_pairs if shape.rope == "grid" else rotate_halves
        q, k = turn(q, rope).transpose(1, 2), turn(k, rope).transpose(1, 2)
        if cache is not None:
            k, v = cache.layers[0].update(k, v)
        seen = mask if mask.dim() == 2 else mask.unsqueeze(1)
        grouped = shape.num_heads != shape.num_kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class HeadNorm(nn.Module):
    """Layer norm over the width of each head; statistics, gain and bias are the head's own (Chameleon)."""

    def __init__(self, heads: int, head_dim: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        return F.layer_norm(states, states.shape[-1:], eps=self.eps) * self.weight + self.bias


class GatedFeedForward(nn.Module):
    def __init__(self, shape: LayerShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))


class Rotary:
    """Cosines and sines [...,E/2,2] float32 of positions [...]; no module, so that it stays float32."""

    def __init__(self, shape: LayerShape):
        self.shape = shape
        if shape.rope == "grid":
            self._table = rope_table(
                shape.grid, shape.head_dim, shape.rope_theta, zeros_before=shape.zeros_before, zeros_behind=20
            )
        else:
            powers = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
            self._table = 1.0 / shape.rope_theta**powers  # [E/2]

    def __call__(self, positions: Tensor) -> Tensor:
        if self._table.device != positions.device:
            self._table = self._table.to(positions.device)
        if self.shape.rope == "grid":
            return self._table[positions]
        angles = positions[..., None].float() * self._table
        return torch.stack([angles.cos(), angles.sin()], dim=-1)


def rotate_halves(states: Tensor, rope: Tensor) -> Tensor:
    """Turn entry i of [R,N,H,E] with entry i + E/2 by `rope` [N,E/2,2] or [R,N,E/2,2]."""
    first, second = states.float().chunk(2, dim=-1)
    cos, sin = rope[..., None, :, 0], rope[..., None, :, 1]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(states)
