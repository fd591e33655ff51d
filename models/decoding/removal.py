"""Hides visual tokens from a target's layers, from some layer on, in the prompt and in everything decoded after it.

What it cannot see there must have reached the text in the layers before (Sparrow, section 2 and figures 3 and 5).
Letters: R rows, N queries, K keys, T prompt places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ..hub import recurrent_layers
from .decoder import CachedDecoder


@contextmanager
def unseen_from(decoder: CachedDecoder, places: Tensor, layer: int) -> Iterator[None]:
    """Within it, the layers from `layer` on (0: all; the number of layers: none) hide `places` from all others.

    Positions stay as they are. A hidden token attends to itself, since a softmax needs at least one key.

    Args:
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
