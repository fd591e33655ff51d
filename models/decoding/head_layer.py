"""The one decoder layer that heads are made of: a target's layer, with the differences that EAGLE's heads have.

Parameter names are those of the published checkpoints (`self_attn.q_proj`, `mlp.gate_proj`, ...).
Letters: R rows, N new positions, K places seen, D width, H heads, G key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import attend
from ..layer import LayerShape
from ..training_passes import TrainingPasses
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
        self, states: Tensor, rope: Tensor | Rotation, mask: Tensor | None, cache: Cache | TrainingPasses | None
    ) -> Tensor:
        """states [R,N,D], rope of a `Rotary`, mask [N,K] or [R,N,K] bool; None: one position sees all, several are
        causal with nothing before them, or what `TrainingPasses` says.
        """
        return through(self, states, self.input_layernorm(states), rope, mask, cache)


def through(
    layer: Any, states: Tensor, inputs: Any, rope: Tensor | Rotation, mask: Tensor | None,
    cache: Cache | TrainingPasses | None,
) -> Tensor:  # fmt: skip
    """States [R,N,D] after a layer whose attention reads `inputs` [R,N,...]; the rest as of `DecoderLayer.forward`."""
    mixed = layer.self_attn(inputs, rope, mask, cache)
    states = states[:, -mixed.shape[1] :] + mixed  # a first pass of training may leave inputs out
    return states + layer.mlp(layer.post_attention_layernorm(states))


def for_heads(mask: Tensor | None) -> Tensor | None:
    """[N,K] as it is, [R,N,K] as [R,1,N,K]."""
    return mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask


class Rotation(NamedTuple):
    """Rotates heads [R,N,H,E] whose halves turn together: cosines and signed sines [R,N,1,E] or [1,N,1,E]."""

    cos: Tensor
    sin: Tensor

    def __call__(self, heads: Tensor) -> Tensor:
        """Heads, turned in float32; the bits are those of `rotate_halves`."""
        wide = heads.float()
        return (wide * self.cos + wide.roll(heads.shape[-1] // 2, -1) * self.sin).to(heads)


class HeadAttention(nn.Module):
    """Self-attention of Llama's layout, with the biases and norms that the shape names."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.head_dim = shape.head_dim
        self.shape = shape
        width, inner, shared = shape.attention_input or shape.hidden_size, shape.num_heads, shape.num_kv_heads
        self.q_proj = nn.Linear(width, inner * shape.head_dim, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(width, shared * shape.head_dim, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(width, shared * shape.head_dim, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(inner * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = _head_norm(shape, inner), _head_norm(shape, shared)

    def turn(self, heads: Tensor, rope: Tensor | Rotation) -> Tensor:
        """Heads [R,N,H,E] turned by `rope`, as of `DecoderLayer.forward`."""
        if isinstance(rope, Rotation):
            return rope(heads)
        return (rotate_pairs if self.shape.rope == "grid" else rotate_halves)(heads, rope)

    def forward(
        self, states: Tensor, rope: Tensor | Rotation, mask: Tensor | None, cache: Cache | TrainingPasses | None
    ) -> Tensor:
        """States [R,N,D] -> [R,N,D], or of the last inputs alone; arguments as in `DecoderLayer.forward`."""
        read, keys, values = self.q_proj(states), self.k_proj(states), self.v_proj(states)
        return self.o_proj(self.mixed(read, keys, values, rope, mask, cache))

    def mixed(
        self, read: Tensor, keys: Tensor, values: Tensor, rope: Tensor | Rotation, mask: Tensor | None,
        cache: Cache | TrainingPasses | None,
    ) -> Tensor:  # fmt: skip
        """Values [R,N,H*E] that the queries `read` [R,N,H*E] find among `keys` and `values` [R,N,G*E]; the rest as of
        `forward`.
        """
        shape = self.shape
        q = self.q_norm(read.unflatten(-1, (shape.num_heads, self.head_dim)))  # [R,N,H,E]
        k = self.k_norm(keys.unflatten(-1, (shape.num_kv_heads, self.head_dim)))
        v = values.unflatten(-1, (shape.num_kv_heads, self.head_dim)).transpose(1, 2)
        # At once: small models wait for the calls, not for the numbers.
        q, k = (
            self.turn(torch.cat([q, k], dim=2), rope)
            .transpose(1, 2)
            .split([shape.num_heads, shape.num_kv_heads], dim=1)
        )
        if isinstance(cache, TrainingPasses):
            assert mask is None, "passes of training know what they see"
            return cache.attend(q, k, v).transpose(1, 2).flatten(2)
        if cache is not None:
            k, v = cache.kv_layers[0].update(k, v)
        return attend(q, k, v, for_heads(mask)).transpose(1, 2).flatten(2)


def _head_norm(shape: LayerShape, heads: int) -> nn.Module:
    if shape.qk_rms_norm:
        return RMSNorm(shape.head_dim, shape.norm_eps)
    return HeadNorm(heads, shape.head_dim) if shape.qk_norm else nn.Identity()


class GatedFeedForward(nn.Module):
    """SwiGLU, or gated by another activation."""

    def __init__(self, shape: LayerShape, activation: Callable[[Tensor], Tensor] = F.silu):
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[...,D] -> [...,D]."""
        return self.down_proj(self.activation(self.gate_proj(states)) * self.up_proj(states))


class HeadNorm(nn.Module):
    """Layer norm over the width of each head; statistics, gain and bias are the head's own (Chameleon)."""

    def __init__(self, heads: int, head_dim: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """[R,N,H,E] -> [R,N,H,E]; H is G where keys are normed."""
        return F.layer_norm(states, states.shape[-1:], eps=self.eps) * self.weight + self.bias


class RMSNorm(nn.Module):
    """Normalised in float32, cast back, then scaled: the order of the published code."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """[...,D] -> [...,D]."""
        if states.dtype == self.weight.dtype == torch.float32 and states.device.type == "cpu":
            # The same operations in one call, and the same bits.
            return F.rms_norm(states, self.weight.shape, self.weight, self.eps)
        if not torch.is_grad_enabled():
            return F.rms_norm(states, self.weight.shape, None, self.eps) * self.weight
        wide = states.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(states) * self.weight


class Rotary:
    """Cosines and sines [...,E/2,2] float32 of positions [...]; no module, so that it stays float32.

    Positions [3,R,N] turn by time, row and column where the shape has M-RoPE.
    """

    def __init__(self, shape: LayerShape):
        self.shape = shape
        if shape.rope == "grid":
            self._table = rope_table(
                shape.grid, shape.head_dim, shape.rope_theta, zeros_before=shape.zeros_before, zeros_behind=20
            )
        else:
            self._table, self._gain = frequencies(shape)  # [E/2]
            self._axes = _axes(shape)  # [3,E/2] float32 of zeros and ones; no rows without M-RoPE

    def __call__(self, positions: Tensor) -> Tensor:
        if self._table.device != positions.device:
            self._table = self._table.to(positions.device)
        if self.shape.rope == "grid":
            return self._table[positions]
        angles = positions[..., None].float() * self._table
        if positions.dim() == 3:
            assert len(self._axes), "positions of three rows need M-RoPE"
            angles = (angles * self._axes.to(angles.device)[:, None, None]).sum(0)
        turned = torch.stack([angles.cos(), angles.sin()], dim=-1)
        return turned if self._gain == 1.0 else self._gain * turned

    def table(self, length: int, device: torch.device) -> Tensor | None:
        """[length,2*E] float32: where `rotation` finds the first `length` positions; None: of a grid, which has one."""
        if self.shape.rope == "grid":
            return None
        cos, sin = self(torch.arange(length, device=device)).unbind(-1)
        return torch.cat([cos, cos, -sin, sin], dim=-1)


def rotation(table: Tensor, positions: Tensor) -> Rotation:
    """Return the rotation of positions [R,N] int64, from a `Rotary.table`."""
    return Rotation(*F.embedding(positions, table).unsqueeze(-2).chunk(2, dim=-1))


def frequencies(shape: LayerShape) -> tuple[Tensor, float]:
    """[E/2] float32, and what cosines and sines are multiplied by (YaRN)."""
    if shape.rope_scaling is None:
        powers = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        return 1.0 / shape.rope_theta**powers, 1.0
    rope = {"rope_theta": shape.rope_theta, **shape.rope_scaling}
    from transformers import LlamaConfig  # brings the code of models
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=shape.hidden_size, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
        rope_parameters=rope,
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)


def _axes(shape: LayerShape) -> Tensor:
    """The one of three positions that turns each frequency: in blocks (Qwen2-VL), or alternating (Qwen3-VL)."""
    if not shape.mrope_section:
        return torch.zeros(0, shape.head_dim // 2)
    axes = torch.zeros(shape.head_dim // 2, dtype=torch.int64)
    if shape.mrope_interleaved:
        # Every third frequency is a row's or a column's as far as their numbers go; all others are time's.
        for axis in (1, 2):
            axes[axis : 3 * shape.mrope_section[axis] : 3] = axis
    else:
        axes = torch.arange(3).repeat_interleave(torch.tensor(shape.mrope_section))
    return F.one_hot(axes, 3).T.float()


def rope_table(grid: int, head_dim: int, base: float, *, zeros_before: int, zeros_behind: int = 10) -> Tensor:
    """Cosines and sines [zeros_before + grid^2 + zeros_behind, head_dim/2, 2] float32; half of the pairs turn with the
    row, half with the column.

    Rows of condition positions are zero in both, as published: an identity rotation there is another model.
    """
    half = head_dim // 2
    frequencies = 1.0 / base ** (torch.arange(0, half, 2)[: half // 2].float() / half)
    angles = torch.arange(grid).float()[:, None] * frequencies  # [grid, half/2]
    by_row = angles[:, None].expand(grid, grid, -1)
    by_column = angles[None].expand(grid, grid, -1)
    cells = torch.cat([by_row, by_column], dim=-1).flatten(0, 1)
    table = torch.stack([cells.cos(), cells.sin()], dim=-1)
    return F.pad(table, (0, 0, 0, 0, zeros_before, zeros_behind))


def rotate_pairs(states: Tensor, rope: Tensor) -> Tensor:
    """Turn neighbouring pairs of [R,N,H,E] by `rope` [N,E/2,2] or [R,N,E/2,2]."""
    pairs = states.float().unflatten(-1, (-1, 2))
    # A product of complex numbers is one call. On a CPU it has the same bits in whole vectors, of at most 8 pairs: what
    # is left over is fused and rounded once.
    if not torch.is_grad_enabled() and rope.shape[-2] % 8 == 0:
        turned = torch.view_as_complex(pairs) * torch.view_as_complex(rope).unsqueeze(-2)
        return torch.view_as_real(turned).flatten(-2).to(states)
    cos, sin = rope[..., None, :, 0], rope[..., None, :, 1]
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(states)


def turning(shape: LayerShape, rope: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that rotates heads [R,n,H,E] at the last n of the places of `rope` [R,N,E/2,2].

    Cosines and signed sines are laid out once, for all layers of a pass.
    """
    if shape.rope == "grid":
        return lambda heads: rotate_pairs(heads, rope[:, rope.shape[1] - heads.shape[1] :])
    cos, sin = rope[..., None, :, 0], rope[..., None, :, 1]
    cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def turn(heads: Tensor) -> Tensor:
        last = slice(cos.shape[1] - heads.shape[1], None)
        return Rotation(cos[:, last], sin[:, last])(heads)

    return turn


def rotate_halves(states: Tensor, rope: Tensor) -> Tensor:
    """Turn entry i of [R,N,H,E] with entry i + E/2 by `rope` [N,E/2,2] or [R,N,E/2,2]."""
    first, second = states.float().chunk(2, dim=-1)
    cos, sin = rope[..., None, :, 0], rope[..., None, :, 1]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(states)
