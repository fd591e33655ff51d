"""Gemma 4 of transformers: its class, its config and its masks.

The tower reads a picture whole, in as many patches as it has, of which 3 x 3 are averaged to one token. transformers
makes masks of a cache of its own; ours are explicit and rest on positions.
Letters: B rows, T tokens, N queries, K keys, L layers, E width of a layer's own embedding.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....core.errors import UserError
from ...hub import config_value

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def check_text(text: PreTrainedConfig) -> None:
    """Raises `UserError` for a text config whose model our forward does not run exactly."""
    if config_value(text, "enable_moe_block"):
        raise UserError(
            "this Gemma 4 is a mixture of experts (26B-A4B), whose experts were never compared here with transformers' "
            "over a tree", key="target", hint="use a dense one: E2B, E4B or 31B",
        )  # fmt: skip
    if config_value(text, "use_bidirectional_attention") == "all":
        raise UserError("all tokens of this model see each other: it writes no text", key="target",
                        hint="use a Gemma 4 that answers")  # fmt: skip
    # Tables alone are read without layers.
    shared = text.num_hidden_layers and config_value(text, "num_kv_shared_layers")
    if shared and not config_value(text, "hidden_size_per_layer_input"):
        raise UserError(
            "layers share keys and values, and have no embeddings of their own: transformers' own forward fails on it",
            key="target", hint="set hidden_size_per_layer_input",
        )  # fmt: skip


@functools.cache
def soundless() -> type[PreTrainedModel]:
    """transformers' class without the tower of sounds: E2B and E4B have one, and nothing here reads it."""
    import transformers

    class Gemma4ForConditionalGeneration(transformers.Gemma4ForConditionalGeneration):  # type: ignore[misc]
        """Gemma 4 without the tower of sounds."""

        def __init__(self, config: Any):
            check_text(config.get_text_config())  # before any weight is read
            if config.audio_config is not None:
                config = copy.deepcopy(config)
                config.audio_config = None
            super().__init__(config)
            left_out = self._keys_to_ignore_on_load_unexpected or ()
            self._keys_to_ignore_on_load_unexpected = {*left_out, r"audio_tower\.", r"embed_audio\."}

    return Gemma4ForConditionalGeneration


def layer_tables(decoder: Any, ids: Tensor, visual: Tensor | None = None) -> Tensor | None:
    """[B,T,L*E] of the layers' own tables for ids [B,T], where places of `visual` [B,T] bool, which have no token, take
    the pad token's row; None: the model has none.
    """
    if not decoder.config.hidden_size_per_layer_input:
        return None
    if visual is not None:
        ids = ids.masked_fill(visual, decoder.config.pad_token_id)
    return decoder.embed_tokens_per_layer(ids)


def blocks_of(visual: Tensor) -> Tensor:
    """[B,T] int64: the first place of each run of visual tokens [B,T] bool, at all of its places; -1 elsewhere."""
    places = torch.arange(visual.shape[1]).expand(visual.shape)
    first = visual.clone()
    first[:, 1:] &= ~visual[:, :-1]
    begin = torch.where(first, places, -1).cummax(dim=1).values
    return torch.where(visual, begin, -1)


def apart(blocks: Tensor) -> Tensor:
    """Numbers of blocks [B,T] that differ between rows, too."""
    rows = torch.arange(len(blocks), device=blocks.device)[:, None]
    return torch.where(blocks < 0, blocks, blocks + rows * blocks.shape[1])


def windowed(full: Tensor | None, places: Tensor, keys: Tensor, window: int, blocks: Tensor | None = None) -> Tensor:
    """[B,1,N,K] bool: what queries see in a layer with a window, of what they see elsewhere.

    Args:
        full: [B,1,N,K] bool: what they see in the other layers; None: one sees all, several are causal from 0.
        places: [1,N] or [B,N] int64: positions of the queries.
        keys: [B,K] int64: positions of the keys, the queries' own last.
        window: positions that a query sees, its own included.
        blocks: [B,N] int64: queries of one number from 0 on see each other, and the window behind.
    """
    count, total = places.shape[1], keys.shape[1]
    near = (keys[:, None, :] > places[:, :, None] - window)[:, None]
    if full is None:
        full = torch.ones(1, 1, count, total, dtype=torch.bool, device=keys.device)
        full = full.tril(total - count)
    if blocks is not None:
        same = (blocks[:, :, None] == blocks[:, None, :]) & (blocks[:, :, None] >= 0)
        full = full.expand(len(keys), -1, -1, -1).clone()
        full[..., total - count :] |= same[:, None]
    return full & near


def capped(config: PreTrainedConfig, scores: Tensor) -> Tensor:
    """Scores under the model's soft cap, where it has one, in the order of transformers' operations."""
    cap = config_value(config, "final_logit_softcapping")
    return scores if cap is None else torch.tanh(scores / cap) * cap
