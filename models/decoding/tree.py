"""A cycle's proposal: a tree of drafted tokens under the last committed one. A chain is the trivial tree.

Letters: N nodes without the root, P parents whose children were drawn, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

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
