"""Hooks on the layers of transformers' decoders: what they compute is kept, or places are hidden from them.

A pass in fast kernels returns no attention weights, and an eager one would round its scores differently. The last
layer's own module computes the last place's query once more, over the keys that the cache holds. Of a model that is
sharded over ranks, `full_tensor` and `all_heads` gather what is read outside its module; all ranks call them.
Letters: R rows, N new positions or queries, D width, P past positions, K keys, T prompt places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ..hub import recurrent_layers
from .cache import Cache


def is_cut(weight: Tensor) -> bool:
    """Whether ranks hold parts of it: torch's `DTensor`, a module that is imported where there are several ranks."""
    return hasattr(weight, "full_tensor")


def full_tensor(weight: Any) -> Tensor:
    """The tensor itself, or all parts of one that is cut over ranks."""
    return weight.full_tensor() if is_cut(weight) else weight


def all_heads(weights: Tensor, num_heads: int) -> Tensor:
    """[R,h,K] of this rank's h heads -> [R,H,K] of all `num_heads`: ranks hold neighbouring heads, in their order."""
    count = num_heads // weights.shape[1]
    if count == 1:
        return weights
    parts = [torch.empty_like(weights) for _ in range(count)]
    torch.distributed.all_gather(parts, weights.contiguous())
    return torch.cat(parts, dim=1)


def end_attention(language_model: Any, state: Tensor, cache: Cache, places: Tensor) -> Tensor:
    """[H,K] float32: the last layer's attention of the last committed place over all K.

    `state` [1,1,D] is that layer's input there, `places` its position in the coordinates that the model takes.
    """
    layer, config, held = language_model.layers[-1], language_model.config, cache.kv_layers[-1]
    # What attention asks of a cache: the committed places, of which the query's own is the last; nothing is written.
    committed = held.keys[:, :, : held.length], held.values[:, :, : held.length]
    device = held.keys.device  # a large model's last layer may lie elsewhere than its embedding
    rotations = tuple(part.to(device) for part in language_model.rotary_emb(state, position_ids=places))
    before = config._attn_implementation
    config._attn_implementation = "eager"  # the only one that returns its weights
    try:
        _, weights, *_ = layer.self_attn(
            hidden_states=layer.input_layernorm(state.to(device)),
            position_embeddings=rotations,
            attention_mask=None,
            past_key_values=SimpleNamespace(update=lambda *_, **__: committed),
        )
    finally:
        config._attn_implementation = before
    return all_heads(weights[:, :, -1].to(torch.float32), config.num_attention_heads)[0]


@contextmanager
def tapped(
    model: Any, layers: Sequence[int], attention: Sequence[int]
) -> Iterator[tuple[dict[int, Tensor], dict[int, Tensor]]]:
    """Within it, keeps states and attention weights of the named layers of one forward, and of no other layer.

    Weights are wanted for a prompt only; for that one pass the model computes attention eagerly. They are averaged over
    the queries as they are seen: of 80 layers of 64 heads over 25k places the whole would be gigabytes.
    """
    states, weights = dict[int, Tensor](), dict[int, Tensor]()

    def keep_state(layer: int, module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        states[layer] = output if isinstance(output, Tensor) else output[0]

    def keep_weights(layer: int, module: nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> None:
        heads = output[1].mean(2, dtype=torch.float32)
        weights[layer] = all_heads(heads, model.config.num_attention_heads)

    hooks = [model.layers[layer - 1].register_forward_hook(partial(keep_state, layer)) for layer in layers if layer > 0]
    for layer in attention:
        module = cast(Any, model.layers[layer]).self_attn
        hooks.append(module.register_forward_hook(partial(keep_weights, layer)))
    before = model.config._attn_implementation
    if attention:
        model.set_attn_implementation("eager")
    try:
        yield states, weights
    finally:
        for hook in hooks:
            hook.remove()
        if attention:
            model.set_attn_implementation(before)


@contextmanager
def unseen_from(decoder: Any, places: Tensor, layer: int) -> Iterator[None]:
    """Within it, the layers from `layer` on (0: all; the number of layers: none) hide `places` from all others.

    What they cannot see there must have reached the text in the layers before (Sparrow, section 2, figures 3 and 5).
    Positions stay as they are. A hidden token attends to itself, since a softmax needs at least one key.

    Args:
        decoder: a `CachedDecoder`.
        places: [T] bool of the prompt that the cache begins with; what comes after is seen.
    """
    if recurrent_layers(decoder.language_model.config):
        raise UserError(
            "visual tokens are to be hidden from some layers, and a recurrent state cannot forget what it has read",
            hint="use a target whose layers all attend",
        )
    assert places.dim() == 1 and 0 <= layer <= decoder.num_layers, (places.shape, layer)

    def hide(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, named | {"attention_mask": _hidden(named["attention_mask"], places)}

    hooks = [
        module.register_forward_pre_hook(hide, with_kwargs=True) for module in decoder.language_model.layers[layer:]
    ]
    before, decoder.always_masks = decoder.always_masks, True
    try:
        yield
    finally:
        decoder.always_masks = before
        for hook in hooks:
            hook.remove()


def _hidden(mask: Tensor, places: Tensor) -> Tensor:
    """A mask [R,1,N,K], boolean or additive, whose keys at `places` only their own queries see."""
    queries, keys = mask.shape[-2:]
    key = torch.arange(keys, device=mask.device)
    new_keys = torch.zeros(max(0, keys - len(places)), dtype=torch.bool, device=mask.device)
    hidden = torch.cat([places.to(mask.device), new_keys])[:keys]
    # The queries are the last of the keys.
    hidden = hidden & (key != torch.arange(keys - queries, keys, device=mask.device)[:, None])  # [N,K]
    if mask.dtype == torch.bool:
        return mask & ~hidden
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
