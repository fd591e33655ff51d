"""Passes over a Llama-style decoder or a head's layer without the overhead of torch modules.

Decoding runs many passes over few positions, and there a sixth to a half of a pass on a CPU goes to calls of modules,
keywords that pass from layer to layer, masks that the caller has made already, and classes of outputs. Here the same
operations run in the same order on the modules' own weights, so that every bit is transformers'; on a GPU the sum
within a norm may take another order. The model is looked at once for each request (`Cache.looked_at`): one of another
kind, or with hooks, adapters or parts that lie elsewhere, runs its own forward.
Letters: R rows, N new positions, D width, H heads, G key-value heads, E head width, K places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import FEW, GROUPED, attend, hidden_below
from ..hub import config_value
from ..layer import LLAMA_LIKE
from .cache import Cache, CacheLayer

_EPSILON = "variance_epsilon"  # as transformers' norms call it

Affine = tuple[Tensor, Tensor | None]  # weight and bias
Norm = tuple[Tensor, float]  # weight and epsilon


class Layer(NamedTuple):
    """What a layer computes with."""

    head_dim: int
    scale: float | None  # of scores; None: by the width of a head
    qkv: tuple[Affine, Affine, Affine]
    head_norms: tuple[Norm, Norm] | None  # of queries and keys (Qwen3)
    out: Affine
    feed_forward: tuple[Affine, Affine, Affine]  # gate, up, down
    behind: Norm  # the attention, before the feed-forward
    before: Norm | None = None  # the attention; None: a head's own, which its layer applies


def layers_of(model: Any, cache: Cache) -> list[Layer] | None:
    """The layers of a decoder as they were when a request's `cache` was first written; None: its own forward must run,
    which does something else or more.
    """
    if torch.is_grad_enabled():
        return None
    if cache.looked_at is None:
        cache.looked_at = (_layers(model),)
    found: list[Layer] | None = cache.looked_at[0]
    return found


def _layers(model: Any) -> list[Layer] | None:
    if not _plain((model,), ("Model",)) or model.training:
        return None
    config, layers = model.config, list[Layer]()
    windows = config_value(config, "sliding_window") is not None
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
        mask: [R,1,N,K] bool or additive; None: one position sees all, several are causal with nothing before them.
        tapped: layers, counted from 1, after which states are kept.

    Returns:
        The feature [R,N,D], post-final-norm, and the kept states [R,N,D].
    """
    if mask is not None and mask.dtype == torch.bool and mask.shape[-2] <= FEW:
        mask = hidden_below(mask, embeds.dtype)  # once, and not in each layer's attention
    cos, sin = model.rotary_emb(embeds, position_ids=positions)
    half = cos.shape[-1] // 2
    # The sign that a turned half gets, once and not in each layer.
    cos, sin = cos.unsqueeze(2), torch.cat((-sin[..., :half], sin[..., half:]), dim=-1).unsqueeze(2)

    def turn(heads: Tensor) -> Tensor:
        return heads * cos + heads.roll(half, -1) * sin

    states, kept = embeds, dict[int, Tensor]()
    for number, (layer, cached) in enumerate(zip(layers, kv.own_layers, strict=True), 1):
        assert layer.before is not None
        states = step(layer, states, normed(states, layer.before), turn, mask, cached)
        if number in tapped:
            kept[number] = states
    return normed(states, _norm(model.norm, _EPSILON)), kept


def step(
    layer: Layer, states: Tensor, inputs: Tensor, turn: Callable[[Tensor], Tensor], mask: Tensor | None,
    cached: CacheLayer,
) -> Tensor:  # fmt: skip
    """States [R,N,D] after a layer whose attention reads `inputs` [R,N,...]; `turn` rotates heads [R,N,H+G,E]."""
    shape = (*inputs.shape[:2], -1, layer.head_dim)
    q, k, v = [F.linear(inputs, *part).view(shape) for part in layer.qkv]
    if layer.head_norms is not None:
        q, k = normed(q, layer.head_norms[0]), normed(k, layer.head_norms[1])
    heads = q.shape[2]
    turned = turn(torch.cat((q, k), dim=2)).transpose(1, 2)  # at once: small models wait for calls, not for numbers
    keys, values = cached.update(turned[:, heads:], v.transpose(1, 2))
    mixed = attend(turned[:, :heads], keys, values, mask, scale=layer.scale)
    states = states + F.linear(mixed.transpose(1, 2).flatten(2), *layer.out)
    inputs, (gate, up, down) = normed(states, layer.behind), layer.feed_forward
    return states + F.linear(F.silu(F.linear(inputs, *gate)) * F.linear(inputs, *up), *down)


def normed(states: Tensor, norm: Norm) -> Tensor:
    """Norm states as the modules do: in float32, cast back, then scaled. So 16-bit states are rounded twice, before the
    gain and after it: one call with the gain would round once, and differ from transformers in the last place.
    """
    weight, epsilon = norm
    if states.dtype == weight.dtype == torch.float32:
        return F.rms_norm(states, weight.shape, weight, epsilon)
    if states.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return weight * F.rms_norm(states, weight.shape, None, epsilon)
    wide = states.to(torch.float32)
    return weight * F.rms_norm(wide, weight.shape, None, epsilon).to(states.dtype)


def _layer(layer: Any) -> Layer | None:
    parts = layer._modules
    attention, mlp = parts.get("self_attn"), parts.get("mlp")
    if not _plain((layer, attention, mlp), ("DecoderLayer", "Attention", "MLP")):
        return None
    before, own = parts["input_layernorm"], attention._modules
    if not _plain((before, mlp._modules["act_fn"]), ("RMSNorm", "SiLUActivation")):
        return None
    of_heads = (own["q_norm"], own["k_norm"]) if "q_norm" in own else ()
    found = _computing(own, mlp._modules, parts["post_attention_layernorm"], of_heads, _EPSILON)
    return None if found is None else Layer(attention.head_dim, attention.scaling, *found, _norm(before, _EPSILON))


def head_layer_of(attention: Any, mlp: Any, behind: nn.Module, cache: Cache) -> Layer | None:
    """What a head's layer computes with after its first norm; None: as of `layers_of`."""
    if torch.is_grad_enabled():
        return None
    if cache.looked_at is None:
        cache.looked_at = (_head_layer(attention, mlp, behind),)
    found: Layer | None = cache.looked_at[0]
    return found


def _head_layer(attention: Any, mlp: Any, behind: nn.Module) -> Layer | None:
    if not _plain((attention, mlp), ("HeadAttention", "GatedFeedForward")):
        return None
    own = attention._modules
    of_heads = (own["q_norm"], own["k_norm"])
    found = _computing(
        own, mlp._modules, behind, () if _plain(of_heads, ("Identity", "Identity")) else of_heads, "eps"
    )  # fmt: skip
    return None if found is None else Layer(attention.shape.head_dim, None, *found)


def _computing(
    own: dict[str, Any], wide: dict[str, Any], behind: Any, of_heads: Sequence[Any], epsilon: str
) -> tuple[Any, Any, Any, Any, Any] | None:
    """The fields of a `Layer` from `qkv` to `behind`."""
    linear = (
        own["q_proj"], own["k_proj"], own["v_proj"], own["o_proj"], wide["gate_proj"], wide["up_proj"],
        wide["down_proj"],
    )  # fmt: skip
    if not _plain((*linear, behind, *of_heads), _COMPUTING[: 8 + len(of_heads)]):
        return None
    q, k, v, out, *feed_forward = [(part._parameters["weight"], part._parameters["bias"]) for part in linear]
    norms = tuple(_norm(part, epsilon) for part in of_heads) or None
    return (q, k, v), norms, out, tuple(feed_forward), _norm(behind, epsilon)


_COMPUTING = ("Linear",) * 7 + ("RMSNorm",) * 3


def _norm(module: Any, epsilon: str) -> Norm:
    return module._parameters["weight"], module.__dict__[epsilon]


def _plain(modules: Sequence[Any], parts: tuple[str, ...]) -> bool:
    """Whether calling each module is the forward of such a part's class and nothing else."""
    if tuple(map(_part, map(type, modules))) != parts:
        return False
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return False
    return True


@cache
def _part(kind: type) -> str | None:
    """Which part of a decoder a class of a known family is: Model, DecoderLayer, Attention, MLP, RMSNorm, ...

    Classes of ours name it themselves (`unwrapped_as`), each for itself: one that extends them may compute otherwise.
    """
    from transformers.activations import SiLUActivation  # a model of transformers has imported it

    if kind in (nn.Linear, nn.Identity, SiLUActivation):
        return kind.__name__
    if (ours := vars(kind).get("unwrapped_as")) is not None:
        return str(ours)
    family = kind.__module__.removeprefix("transformers.models.").partition(".")[0]
    named = kind.__module__ == f"transformers.models.{family}.modeling_{family}"
    prefix = LLAMA_LIKE.get(family)
    return kind.__name__.removeprefix(prefix) if named and prefix and kind.__name__.startswith(prefix) else None
