"""Passes over a decoder of Llama's kind without what transformers wraps around each operation.

Decoding runs many passes over few positions, and there a sixth to a half of a pass on a CPU goes to calls of modules,
keywords that pass from layer to layer, masks that the caller has made already, and classes of outputs. Here the same
operations run in the same order on the modules' own weights, so that every bit is transformers'. The model is looked at
again in each pass: one of another kind, or with hooks, adapters or parts that lie elsewhere, runs its own forward.
Letters: R rows, N new positions, D width, H heads, G key-value heads, E head width, K places.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import GROUPED, attend
from .cache import Cache, CacheLayer

# Families of transformers whose layers are alike, but for biases and norms of heads.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

Affine = tuple[Tensor, Tensor | None]  # weight and bias
Norm = tuple[Tensor, float]  # weight and epsilon


class Layer(NamedTuple):
    """What a layer computes with."""

    head_dim: int
    scale: float
    qkv: tuple[Affine, Affine, Affine]
    head_norms: tuple[Norm, Norm] | None  # of queries and keys (Qwen3)
    out: Affine
    norms: tuple[Norm, Norm]  # before the attention and before the feed-forward
    feed_forward: tuple[Affine, Affine, Affine]  # gate, up, down


def layers_of(model: Any) -> list[Layer] | None:
    """The layers of a decoder as they are now; None: its own forward must run, which does something else or more."""
    if torch.is_grad_enabled() or not _plain((model,), ("Model",)) or model.training:
        return None
    config, layers = model.config, list[Layer]()
    windows = getattr(config, "sliding_window", None) is not None
    if windows or config._attn_implementation not in ("sdpa", GROUPED) or not _plain((model.norm,), ("RMSNorm",)):
        return None
    for module in model.layers:
        if (layer := _layer(module)) is None:
            return None
        layers.append(layer)
    return layers


def run(
    model: Any, layers: Sequence[Layer], embeds: Tensor, kv: Cache, positions: Tensor, mask: Tensor | None,
    tapped: Collection[int] = (),
) -> tuple[Tensor, dict[int, Tensor]]:  # fmt: skip
    """Run N new positions [R,N,D] of a `model` whose `layers` these are; writes their keys and values into `kv`.

    Args:
        positions: [R,N] int64; one row counts for all.
        mask: [R,1,N,K] bool; None: one position sees all, several are causal with nothing before them.
        tapped: layers, counted from 1, behind which states are kept.

    Returns:
        The feature [R,N,D], post-final-norm, and the kept states [R,N,D].
    """
    cos, sin = model.rotary_emb(embeds, position_ids=positions)
    half = cos.shape[-1] // 2
    # The sign that a turned half gets, once and not in each layer.
    rope = cos.unsqueeze(2), torch.cat((-sin[..., :half], sin[..., half:]), dim=-1).unsqueeze(2)
    states, kept = embeds, dict[int, Tensor]()
    for number, (layer, cached) in enumerate(zip(layers, kv.own_layers, strict=True), 1):
        before, behind = layer.norms
        states = states + _attention(layer, _normed(states, before), rope, mask, cached)
        gate, up, down = layer.feed_forward
        inputs = _normed(states, behind)
        states = states + F.linear(F.silu(F.linear(inputs, *gate)) * F.linear(inputs, *up), *down)
        if number in tapped:
            kept[number] = states
    return _normed(states, _norm(model.norm)), kept


def _attention(
    layer: Layer, inputs: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cached: CacheLayer
) -> Tensor:
    q, k, v = (F.linear(inputs, *part).unflatten(-1, (-1, layer.head_dim)) for part in layer.qkv)  # [R,N,H or G,E]
    if layer.head_norms is not None:
        q, k = _normed(q, layer.head_norms[0]), _normed(k, layer.head_norms[1])
    heads, (cos, sin) = q.shape[2], rope
    both = torch.cat((q, k), dim=2)  # turned at once: small models wait for the calls, not for the numbers
    turned = (both * cos + both.roll(layer.head_dim // 2, -1) * sin).transpose(1, 2)
    keys, values = cached.update(turned[:, heads:], v.transpose(1, 2))
    mixed = attend(turned[:, :heads], keys, values, mask, scale=layer.scale)
    return F.linear(mixed.transpose(1, 2).flatten(2), *layer.out)


def _normed(states: Tensor, norm: Norm) -> Tensor:
    """As transformers' norms do: in float32, cast back, then scaled."""
    weight, epsilon = norm
    wide = states.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(states.dtype)


# Of a layer: what holds the other parts, and what computes.
_HOLDING = ("DecoderLayer", "Attention", "MLP")
_COMPUTING = ("Linear",) * 7 + ("RMSNorm",) * 2


def _layer(layer: Any) -> Layer | None:
    parts = layer._modules
    attention, mlp = parts.get("self_attn"), parts.get("mlp")
    if not _plain((layer, attention, mlp), _HOLDING):
        return None
    own, wide = attention._modules, mlp._modules
    linear = (
        own["q_proj"], own["k_proj"], own["v_proj"], own["o_proj"], wide["gate_proj"], wide["up_proj"],
        wide["down_proj"],
    )  # fmt: skip
    norms = parts["input_layernorm"], parts["post_attention_layernorm"]
    of_heads = (own["q_norm"], own["k_norm"]) if "q_norm" in own else ()
    if not _plain((*linear, *norms), _COMPUTING) or not _plain((wide["act_fn"],), ("SiLUActivation",)):
        return None
    if of_heads and not _plain(of_heads, ("RMSNorm", "RMSNorm")):
        return None
    q, k, v, out, gate, up, down = [(part._parameters["weight"], part._parameters["bias"]) for part in linear]
    head_norms = (_norm(of_heads[0]), _norm(of_heads[1])) if of_heads else None
    return Layer(
        attention.head_dim, attention.scaling, (q, k, v), head_norms, out, (_norm(norms[0]), _norm(norms[1])),
        (gate, up, down),
    )  # fmt: skip


def _norm(module: Any) -> Norm:
    return module._parameters["weight"], module.variance_epsilon


def _plain(modules: Sequence[Any], parts: tuple[str, ...]) -> bool:
    """Whether calling each module is the forward of such a part's class and nothing else. Short: each pass asks."""
    if tuple(map(_part, map(type, modules))) != parts:
        return False
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return False
    return True


@cache
def _part(kind: type) -> str | None:
    """Which part of a decoder a class of a known family is: Model, DecoderLayer, Attention, MLP, RMSNorm, ..."""
    if kind is nn.Linear or kind.__module__ == "transformers.activations":
        return kind.__name__
    family = kind.__module__.removeprefix("transformers.models.").partition(".")[0]
    named = kind.__module__ == f"transformers.models.{family}.modeling_{family}"
    prefix = FAMILIES.get(family)
    return kind.__name__.removeprefix(prefix) if named and prefix and kind.__name__.startswith(prefix) else None
