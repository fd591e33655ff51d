"""Copies several small host arrays to the device at once: a level of a tree needs several, and each copy costs time.

Letters: N nodes without the root.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...core.states import uploaded
from .tree import Tree

_ALIGNED = 8  # bytes: a part of the copy that is read as int64 begins at a multiple


def upload(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """The arrays on `device`, each with its shape and dtype. The host does not wait; on a CPU nothing is copied."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0, *(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays)]).tolist()
    # Never empty: nothing of an empty buffer can be read as another type.
    joined = np.zeros(starts[-1] + _ALIGNED, dtype=np.uint8)
    for start, array in zip(starts, arrays, strict=False):
        joined[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there, parts = uploaded(torch.from_numpy(joined), device), []
    for start, array in zip(starts, arrays, strict=False):
        dtype = torch.from_numpy(array[:0]).dtype
        parts.append(there[start : start + array.nbytes].view(dtype).view(array.shape))
    return parts


def upload_tokens(device: torch.device, tokens: Tensor, *arrays: np.ndarray) -> list[Tensor]:
    """Return `tokens` [N] int64, which may be on the device already, and then the arrays, as `upload` does."""
    if tokens.device.type != "cpu":
        return [tokens.to(device), *upload(device, *arrays)]
    return upload(device, tokens.numpy(), *arrays)


def upload_tree(
    device: torch.device, tree: Tree, root: int, first: int, *, always_mask: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the pass over a tree reads: ids [N+1], positions [N+1] and who sees whom [N+1,N+1] bool, the root first.

    Args:
        root: its token.
        first: the root's position (the cache's length, plus M-RoPE's delta); a node's is its depth further, alike in
            all coordinates.
        always_mask: False leaves the mask of a chain out (None), which attention knows without one.
    """
    arrays = [np.array([first, *(first + depth for depth in tree.depths)])]
    if always_mask or not tree.is_chain:
        arrays.append(tree.ancestor_mask().numpy())
    if tree.tokens.device.type == "cpu":
        ids, *rest = upload(device, np.append(np.int64(root), tree.tokens.numpy()), *arrays)
    else:
        own, *rest = upload(device, np.array([root]), *arrays)
        ids = torch.cat([own, tree.tokens.to(device)])
    return ids, rest[0], rest[1] if len(rest) > 1 else None
