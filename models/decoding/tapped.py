"""Hidden states and attention weights of chosen layers, kept while one of transformers' decoders runs.

A pass in fast kernels returns no attention weights, and an eager one would round its scores differently. The last
layer's own module computes the last place's query once more, over the keys that the cache holds. Of a model that is
sharded over ranks, `whole` and `all_heads` gather what is read outside its module; all ranks call them.
Letters: R rows, N new positions, D width, P past positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ..hub import has_windows
from .cache import Cache, CacheLayer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def is_cut(weight: Tensor) -> bool:
    """Whether ranks hold parts of it: torch's `DTensor`, a module that is imported where there are several ranks."""
    return hasattr(weight, "full_tensor")


def whole(weight: Any) -> Tensor:
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


class _Committed:
    """A cache as a layer's attention asks for it, which hands over the committed places and takes nothing."""

    def __init__(self, layer: CacheLayer):
        self.layer = layer

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Keys and values [1,G,K,E] of the committed places; the query's own is the last of them."""
        layer = self.layer
        return layer.keys[:, :, : layer.length], layer.values[:, :, : layer.length]


def check_end_attention(language_model: Any) -> None:
    """Raises `UserError` for a decoder whose last layer has no attention over all places."""
    if not hasattr(language_model.layers[-1], "self_attn") or has_windows(language_model.config):
        raise UserError(
            "this target's last layer has no attention over all places, whose share on the picture could be read",
            key="visual_skip",
            hint="leave visual_skip out for it: ViSkip is for LLaVA, Qwen-VL and other decoders of Llama's kind",
        )


def end_attention(language_model: Any, state: Tensor, cache: Cache, places: Tensor) -> Tensor:
    """[H,K] float32: the last layer's attention of the last committed place over all K.

    Args:
        state: [1,1,D], the last layer's input there.
        places: its position, in the coordinates that the model takes.
    """
    layer, config = language_model.layers[-1], language_model.config
    device = cache.own_layers[-1].keys.device  # a large model's last layer may lie elsewhere than its embedding
    rotations = tuple(part.to(device) for part in language_model.rotary_emb(state, position_ids=places))
    before = config._attn_implementation
    config._attn_implementation = "eager"  # the only one that returns its weights
    try:
        _, weights, *_ = layer.self_attn(
            hidden_states=layer.input_layernorm(state.to(device)),
            position_embeddings=rotations,
            attention_mask=None,
            past_key_values=_Committed(cache.own_layers[-1]),
        )
    finally:
        config._attn_implementation = before
    return all_heads(weights[:, :, -1].to(torch.float32), config.num_attention_heads)[0]


class LanguageModel(Protocol):
    """What the cached forward reads of transformers' decoders (`LlamaModel` and its likes)."""

    config: PreTrainedConfig
    layers: Sequence[nn.Module]

    def get_input_embeddings(self) -> nn.Embedding:
        """The table that turns token ids into embeddings; its weight is [V,D]."""
        ...

    def set_attn_implementation(self, attn_implementation: str) -> None:
        """Switch to another attention kernel of transformers: "eager" is the one that returns weights."""
        ...

    def __call__(self, **inputs: Any) -> Any: ...


@contextmanager
def tapped(
    model: LanguageModel, layers: Sequence[int], attention: Sequence[int]
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
