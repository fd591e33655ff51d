"""The product tree of a block: the best nodes if each level has one distribution that does not depend on its parents.

For drafters that answer by level (DFlash, P-EAGLE): one pass gives all levels, a path's probability is the product of
its tokens', and the best nodes are found without another pass. A drafter that reads its own drafts is asked along its
likeliest chain alone. The shape depends on the draft's distributions and never on the verification, so it is exact
with top-k draws.
Letters: L levels, K width, V vocabulary.
"""

from __future__ import annotations

import heapq
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ...core.fields import MOST_LEVELS, MOST_NODES
from ...models.decoding.tree import ROOT, Tree
from .base import Draw, Expand, TreePolicy, TreeSection
from .dynamic import read_ranked


class Product(TreePolicy):
    """The best `total - 1` nodes of the product of up to `levels` levels.

    Args:
        total: nodes of the tree with its root; fewer where fewer are possible.
        levels: most levels.
        width: most children of a node.
    """

    name = "product"
    prunes_by_token = True

    def __init__(self, total: int, levels: int, width: int):
        self.num_nodes, self.num_levels, self.width = total - 1, levels, width
        self.max_nodes = max(self.num_nodes, levels)

    def grow(self, root: Tensor, expand: Expand, draw: Draw, *, max_levels: int) -> Tree:
        assert not draw.sampled, "check_combination refuses this"
        levels, width = min(self.num_levels, max_levels), min(self.width, root.shape[-1])
        ranked = [draw.ranked(root[None], width)]
        for level in range(levels - 1):
            q = expand((level - 1,), ranked[-1][1][0, :1])
            ranked.append(draw.ranked(q, width))
        # One copy to the host for all levels.
        ids, probs = read_ranked((torch.cat([p for p, _ in ranked]), torch.cat([i for _, i in ranked])))
        return best_nodes(ids, probs, self.num_nodes, draw.ends, planned=self.num_levels)


def best_nodes(ids: np.ndarray, probs: np.ndarray, count: int, ends: frozenset[int], *, planned: int = 0) -> Tree:
    """The `count` likeliest nodes, fewer where fewer are possible; below a token of `ends` there are none.

    A node's children and its next sibling are never likelier than it is, so that a heap of what stands next finds them
    in order, parents and better siblings first.

    Args:
        ids: [L,K] of each level, likeliest first.
        probs: [L,K] float64.
    """
    tokens: list[int] = []
    parents: list[int] = []
    expansions: list[int] = []
    # (minus the path's probability, when it was pushed, level, rank, parent, the parent's probability)
    waiting: list[tuple[float, int, int, int, int, float]] = []
    pushed = 0

    def push(level: int, rank: int, parent: int, above: float) -> None:
        nonlocal pushed
        if level < len(ids) and rank < ids.shape[1] and probs[level, rank] > 0:
            # A probability rounded above 1 would score a child above its parent.
            heapq.heappush(waiting, (-above * min(float(probs[level, rank]), 1.0), pushed, level, rank, parent, above))
            pushed += 1

    likeliest = {ROOT}  # nodes of the chain that the drafter was asked along
    push(0, 0, ROOT, 1.0)
    while waiting and len(tokens) < count:
        score, _, level, rank, parent, above = heapq.heappop(waiting)
        node, token = len(tokens), int(ids[level, rank])
        is_expanded = rank == 0 and parent in likeliest and level + 1 < len(ids)
        if is_expanded:
            likeliest.add(node)
        tokens.append(token)
        parents.append(parent)
        expansions.append(level if is_expanded else ROOT)
        push(level, rank + 1, parent, above)
        if token not in ends:
            push(level + 1, 0, node, -score)
    return Tree(torch.tensor(tokens, dtype=torch.int64), tuple(parents), tuple(expansions), planned=planned)


class ProductTree(TreeSection):
    """The product tree of a block, for drafters that answer by level."""

    kind: Literal["product"]
    # Nodes with the root. More are accepted more often, until the target's pass gets slower.
    total: int = Field(60, ge=2, le=MOST_NODES)
    # Most levels; a block has no more than it drafts.
    levels: int = Field(15, ge=1, le=MOST_LEVELS)
    # Most children of a node.
    width: int = Field(10, ge=1, le=MOST_NODES)

    def build(self, *, grid: int | None = None, seed: int = 0) -> Product:
        return Product(self.total, self.levels, self.width)
