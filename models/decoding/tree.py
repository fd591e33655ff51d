"""A cycle's proposal: a tree of drafted tokens under the last committed one. A chain is the trivial tree.

`Expansions` are the nodes that a drafter has run in this cycle; `upload_tree` is what a target's pass reads.
Letters: N nodes without the root, P parents whose children were drawn, V vocabulary, F new expansions, S expansions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.states import uploaded

ROOT = -1


@dataclass(frozen=True)
class Tree:
    """Parents stand before their children; siblings stand in the order in which they were drawn.

    `expansions` says which expansion of the drafter a node was (-1: it was proposed but never expanded), so
    that the drafter can keep its own cache of an accepted path. `draft_probs` holds the full
    distributions that children were *sampled* from, one row for each parent; it is None where
    proposals are deterministic. `by_path` says how the published code lists the leaves of such a tree: a static tree's
    in the order of their paths, and one that grew (EAGLE-2's) in that of their numbers.
    """

    tokens: Tensor  # [N] int64
    parents: tuple[int, ...]  # N, ROOT for children of the root
    expansions: tuple[int, ...]  # N
    draft_probs: Tensor | None = None  # [P,V]
    parent_rows: tuple[int, ...] = ()  # N: row of draft_probs that a node was drawn from
    # Levels that the policy set out to draft. Fewer stand where reranking leaves the deepest out, a token ends the
    # answer, or the answer has no room for more.
    planned: int = 0
    by_path: bool = False

    @property
    def num_nodes(self) -> int:
        """Drafted nodes, without the root."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root has 0, its children 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def num_levels(self) -> int:
        """Depth of the deepest node."""
        return max(self.depths, default=0)

    @property
    def width(self) -> int:
        """Nodes of the widest level."""
        return max((self.depths.count(d) for d in set(self.depths)), default=0)

    @property
    def is_chain(self) -> bool:
        """Whether every node has at most one child."""
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Node (or ROOT) -> its children in draw order."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, in the order in which relaxed greedy acceptance prefers equally long paths."""
        leaves = [node for node in range(self.num_nodes) if node not in self.children]
        if not self.by_path:
            return tuple(leaves)
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            paths.append((*(paths[parent] if parent != ROOT else ()), node))
        return tuple(sorted(leaves, key=paths.__getitem__))

    def ancestor_mask(self) -> Tensor:
        """[N+1,N+1] bool, root first: row i sees itself and its ancestors."""
        return ancestor_mask(self.parents)


def ancestor_mask(parents: tuple[int, ...]) -> Tensor:
    """[N+1,N+1] bool for parents given as node indices; row and column 0 are the root."""
    size = len(parents) + 1
    if all(parent == index - 1 for index, parent in enumerate(parents)):
        return torch.ones(size, size, dtype=torch.bool).tril()
    mask = np.eye(size, dtype=bool)
    mask[:, 0] = True
    # Twice as many generations each time: a row takes over what the last of its known ancestors sees.
    above = np.array([ROOT, *parents]) + 1
    while above.any():
        mask |= mask[above]
        above = above[above]
    return torch.from_numpy(mask)


def chain(tokens: Tensor, draft_probs: Tensor | None = None, *, planned: int = 0) -> Tree:
    """The chain of `tokens` [N], of which the drafter expanded all but the last."""
    n = len(tokens)
    expansions = tuple(i if i < n - 1 else -1 for i in range(n))
    rows = tuple(range(n)) if draft_probs is not None else ()
    return Tree(tokens, tuple(range(-1, n - 1)), expansions, draft_probs, rows, planned or n)


def no_tree() -> Tree:
    """Nothing proposed: one cycle is then a step of plain decoding."""
    return Tree(torch.empty(0, dtype=torch.int64), (), ())


class Expansions:
    """Parents and depths of the expansions of one cycle. A drafter makes a new object for each cycle."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.depths: list[int] = []

    def __len__(self) -> int:
        return len(self.parents)

    def take(self, parents: Sequence[int]) -> list[int]:
        """Give each of `parents` (expansions or ROOT) a child in the next expansions; returns the children's depths
        (root 0).
        """
        depths = [1 if p == ROOT else self.depths[p] + 1 for p in parents]
        self.parents += parents
        self.depths += depths
        return depths

    def ancestors(self, first: int, *, past: int = 0) -> Tensor:
        """[F,past+S] bool: which expansions each of the expansions from `first` on sees: itself and its ancestors, and
        all of the `past` committed positions before them.
        """
        # numpy: single entries of a tensor take ten times as long to set.
        mask = np.zeros((len(self) - first, past + len(self)), dtype=bool)
        mask[:, :past] = True
        for row, expansion in enumerate(range(first, len(self))):
            while expansion != ROOT:
                mask[row, past + expansion] = True
                expansion = self.parents[expansion]
        return torch.from_numpy(mask)


def accepted_expansions(verified: Any) -> list[int]:
    """The accepted path's expansions, up to the first node that the drafter has not expanded."""
    expansions = (verified.tree.expansions[node] for node in verified.path)
    return list(itertools.takewhile(lambda expansion: expansion != ROOT, expansions))


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
    """Inputs of the pass over a tree: ids [N+1], positions [N+1] and the mask [N+1,N+1] bool, the root first.

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
        root_id, *rest = upload(device, np.array([root]), *arrays)
        ids = torch.cat([root_id, tree.tokens.to(device)])
    return ids, rest[0], rest[1] if len(rest) > 1 else None
