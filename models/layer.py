"""The decoder layer that heads are made of, as a shape that mirrors a target's: its sizes, norms and rotary positions.

Letters: R rows, N new positions, H heads, E head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..core.errors import UserError


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
    # Biases of queries, keys and values (Qwen2).
    qkv_bias: bool = False
    # Root mean square norm over the width of each head's queries and keys (Qwen3).
    qk_rms_norm: bool = False
    # Width of a head where it is not hidden_size / num_heads (Qwen3).
    own_head_dim: int | None = None
    # Width of what the attention reads where it is not hidden_size (EAGLE-3: embedding and state beside each other).
    attention_input: int | None = None
    # half: how many frequencies turn by time, row and column (M-RoPE; none: by the place alone), and whether the three
    # alternate (Qwen3-VL).
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    # half: what stretches the rotation, in transformers' words (see `stretched`); None: nothing.
    rope_scaling: dict[str, Any] | None = None

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.own_head_dim or self.hidden_size // self.num_heads

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {**asdict(self), "mrope_section": list(self.mrope_section)}

    def differs_from(self, written: dict[str, Any]) -> tuple[str, Any, Any] | None:
        """The first field that a head's file gives otherwise, with the file's value and this one's.

        What the file does not say is what layers were before they had the field.
        """
        before = {f.name: f.default for f in fields(self)} | {"mrope_section": []}
        for name, expected in self.to_dict().items():
            value = written.get(name, before[name])
            if value != expected:
                return name, value, expected
        return None


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

    unwrapped_as = "RMSNorm"

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """[...,D] -> [...,D]."""
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
            self._table, self._gain = _frequencies(shape)  # [E/2]
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


# Stretched rotations that a layer knows, and the numbers that each has.
STRETCHED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip


def stretched(rope: Mapping[str, Any], max_positions: int | None = None) -> dict[str, Any] | None:
    """What stretches a rotation given as transformers' `rope_parameters` (or the older `rope_scaling`); None: nothing.

    A dynamic one is plain up to the length that its model was trained for, and counts as plain; so does one that turns
    a part of each attention head alone (proportional, Gemma 4). Of a kind that is not in `STRETCHED` the kind alone.

    Args:
        max_positions: of the model, which were its original ones where it does not say.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "mrope", "dynamic", "proportional"):
        return None
    known = {"original_max_position_embeddings": max_positions} | {k: v for k, v in rope.items() if v is not None}
    return {"rope_type": kind} | {name: known[name] for name in STRETCHED.get(kind, ()) if name in known}


def written_rope(values: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The rotation that a head's `config.json` names: that of `rope_parameters` (or the older `rope_scaling`), with the
    base from there or from `rope_theta` beside it.

    Raises:
        UserError: two bases are named, and readers differ on which one they take (transformers 5: the inner one).
    """
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    kinds = [one for one in rope.values() if isinstance(one, Mapping)]  # a rotation for each kind of layers
    inner = [one["rope_theta"] for one in (kinds or [rope]) if one.get("rope_theta") is not None]
    bases = [*inner, *([] if values.get("rope_theta") is None else [values["rope_theta"]])]
    if any(base != bases[0] for base in bases):
        raise UserError(
            f"two rotary bases are named: rope_theta is {' and '.join(dict.fromkeys(map(str, bases)))}",
            where=str(where), hint="keep the one that the head was trained with",
        )  # fmt: skip
    return dict(kinds[0] if kinds else rope) | ({"rope_theta": bases[0]} if bases else {})


def _frequencies(shape: LayerShape) -> tuple[Tensor, float]:
    """[E/2] float32, and what cosines and sines are multiplied by (YaRN)."""
    if shape.rope_scaling is None:
        powers = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        return 1.0 / shape.rope_theta**powers, 1.0
    rope = {"rope_theta": shape.rope_theta, **shape.rope_scaling}
    config = LlamaConfig(
        hidden_size=shape.hidden_size, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
        rope_parameters=rope,
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)


def _axes(shape: LayerShape) -> Tensor:
    """Which of the three positions turns each frequency: in blocks (Qwen2-VL), or by turns (Qwen3-VL)."""
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
    cos, sin = rope[..., None, :, 0], rope[..., None, :, 1]
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(states)


def rotate_halves(states: Tensor, rope: Tensor) -> Tensor:
    """Turn entry i of [R,N,H,E] with entry i + E/2 by `rope` [N,E/2,2] or [R,N,E/2,2]."""
    first, second = states.float().chunk(2, dim=-1)
    cos, sin = rope[..., None, :, 0], rope[..., None, :, 1]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(states)
