"""DFlash's blocks attend a few at a time: they read the states before their last anchor and each other, so that
fewer read less in vain, and no mask of all blocks and states is made.

Letters: B rows, A blocks, C states of a row, Q places of all blocks, N of a few, H heads, G key-value heads, E width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Blocks at a time. A GPU would wait for the calls of many small pieces.
BLOCKS, BLOCKS_ON_CPU = 64, 8


def attention(
    mask_of: Callable[[slice, int], Tensor], anchors: Tensor, total: int,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], device: torch.device,
) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:  # fmt: skip
    """What stands in for `attend` with the mask of all blocks after `anchors` [B,A] (on the CPU): (layer, [B,H,Q,E],
    [B,G,C+Q,E] twice) -> [B,H,Q,E]. `mask_of` some blocks and R gives [B,1,N,R+N] bool, what their places see of the
    first R of `total` C states and of each other.
    """
    most = BLOCKS_ON_CPU if device.type == "cpu" else BLOCKS
    starts = range(0, anchors.shape[1], most)
    # The host knows how far the last anchor reaches, and waits for nothing.
    reaches = [int(some.max()) for some in anchors.split(most, dim=1)]
    masks = [mask_of(slice(start, start + most), reach) for start, reach in zip(starts, reaches, strict=True)]
    sizes = [mask.shape[2] for mask in masks]

    def attend_in_pieces(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Split at once: the backward pass would write each slice into zeros of all places.
        (keys, *block_keys), (values, *block_values) = (x.split([total, *sizes], dim=2) for x in (k, v))
        mixed = []
        for mask, reach, queries, *blocks in zip(
            masks, reaches, q.split(sizes, dim=2), block_keys, block_values, strict=True
        ):  # fmt: skip
            k, v = (torch.cat([x[:, :, :reach], one], dim=2) for x, one in zip((keys, values), blocks, strict=True))
            mixed.append(attend(queries, k, v, mask))
        return torch.cat(mixed, dim=2)

    return attend_in_pieces
