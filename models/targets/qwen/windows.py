"""A Qwen-VL's vision tower: attention over all windows of a length at once, and inputs that the host computes.

transformers calls a kernel once for each window, frame or picture, or hands all to a kernel for sequences of several
lengths, which only flash attention has. Here all of one length are one call, in training and in decoding: a picture's
windows have few lengths. What follows from the pictures' sizes is computed where these are known, on the host, so that
no pass waits for a GPU. Letters: R rows, H heads, E head width, S patches, W windows, I pictures.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....core.states import uploaded
from ...attention import run_over
from ...hub import config_value

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WINDOWS = "windows_as_flash"  # "flash": transformers then hands over all windows at once


def use_windows(config: PreTrainedConfig) -> None:
    """Run a Qwen-VL's tower, by its own config, over `attend_in_windows` where it would run sdpa window by window."""
    run_over(config, WINDOWS, attend_in_windows, "cu_seq_lens_q")


def attend_in_windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor,
) -> Tensor:
    """[1,H,S,E] of queries, keys and values [1,H,S,E], each patch attending to its own window.

    `cu_seq_lens_q` [W+1] says where each window begins, and where the last ends; on the CPU.
    """
    assert mask is None, "a window sees itself whole"
    windows = [(end - start, start) for start, end in itertools.pairwise(cu_seq_lens_q.tolist()) if end > start]
    by_length = sorted(windows, key=lambda window: window[0])  # stable: those of a length keep their order
    order = None
    if by_length != windows:
        patches = [torch.arange(start, start + length) for length, start in by_length]
        order = uploaded(torch.cat(patches), q.device)
    # [S,H,E], windows of a length one after another.
    parts = [part[0].transpose(0, 1) for part in (q, k, v)]
    if order is not None:
        parts = [part.index_select(0, order) for part in parts]
    mixed, first = [], 0
    for length, same in itertools.groupby(length for length, _ in by_length):
        count = len(list(same))
        rows = slice(first, first + length * count)
        queries, keys, values = (
            part[rows].unflatten(0, (count, length)).transpose(1, 2) for part in parts
        )  # [W,H,.,E]
        out = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, scale=scale)
        mixed.append(out.transpose(1, 2).flatten(0, 1))
        first = rows.stop
    whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
    if order is not None:
        whole = torch.empty_like(whole).index_copy(0, order, whole)
    return whole.transpose(0, 1)[None]


def tower_inputs(tower: Any, sizes: Tensor, device: torch.device) -> dict[str, Any]:
    """Keywords of a tower's forward that transformers computes of the sizes of its pictures, here on the host: [I,3]
    frames, rows and columns of patches, on the CPU.
    """
    from transformers.vision_utils import (
        get_vision_cu_seqlens,
        get_vision_interpolation_indices_and_weights,
        get_vision_position_ids,
        get_vision_window_index,
    )

    config, merge = tower.config, tower.config.spatial_merge_size
    # Our attention reads where windows begin on the host, other kernels on the device.
    reads = torch.device("cpu") if config._attn_implementation == WINDOWS else device
    inputs = {
        "grid_thw": sizes,
        "cu_seqlens": uploaded(get_vision_cu_seqlens(sizes), reads),
        "position_ids": uploaded(get_vision_position_ids(sizes, merge), device),
    }
    if (window := config_value(config, "window_size")) is not None:  # Qwen2.5-VL
        index, ends = get_vision_window_index(sizes, merge, window, config.patch_size)
        inputs |= {"window_index": uploaded(index, device), "cu_window_seqlens": uploaded(ends, reads)}
    if config_value(config, "num_position_embeddings") is not None:  # Qwen3-VL
        indices, weights = get_vision_interpolation_indices_and_weights(
            sizes,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        inputs |= {"interp_indices": uploaded(indices, device), "interp_weights": uploaded(weights, device)}
    return inputs
