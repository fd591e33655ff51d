"""What the last committed place attends to in a decoder's last layer, computed once more from what a pass has left.

A pass in fast kernels returns no attention weights, and an eager one would round its scores differently. The layer's
own module computes this single query again, over the keys that the cache holds; the cache stays as it is.
Of a model that is sharded over ranks (transformers' tensor parallel plan), outputs of modules are whole as they come;
`whole` and `all_heads` gather weights that are read outside their module, and each rank's heads. All ranks call them.
Letters: D width, H heads, K places, R rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.errors import UserError
from ..hub import has_windows
from .cache import Cache, CacheLayer


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
