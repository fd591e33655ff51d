"""EAGLE-2's dynamic tree: a beam of the likeliest prefixes, of whose children the best become the tree.

The shape depends on the draft's distributions and never on the verification, so it is exact with top-k draws;
dropping drawn nodes by their scores makes it inexact with sampled ones.
Source: EAGLE-2, expansion and reranking phases; LANTERN uses it as it is.
Letters: C candidates, D expansions, F nodes expanded at once, K width, N nodes without the root, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ...core.fields import MOST_LEVELS, MOST_NODES
from ...models.decoding.tree import ROOT, Tree
from .base import Draw, Expand, TreePolicy, TreeSection


class Dynamic(TreePolicy):
    """The best `total - 1` of K + D * K * K candidates.

    Args:
        total: nodes of the tree with its root (EAGLE's `total_tokens`); fewer where there are fewer candidates.
        depth: expansions D (EAGLE's `depth`): the tree has up to D + 1 levels.
        width: children of a node, and nodes expanded at once (EAGLE's `top_k`).
    """

    name = "dynamic"
    prunes_by_token = True

    def __init__(self, total: int, depth: int, width: int):
        self.num_nodes, self.width, self.num_levels = total - 1, min(width, total - 1), depth + 1
        self.max_nodes = most_written(self.num_nodes, depth=depth, width=self.width)

    def grow(self, root: Tensor, expand: Expand, draw: Draw, *, max_levels: int) -> Tree:
        assert not draw.sampled, "check_combination refuses this"
        levels = min(self.num_levels, max_levels)
        beam = candidates(root, expand, width=self.width, levels=levels, draw=draw)
        return beam.best(self.num_nodes, planned=self.num_levels)


@dataclass(frozen=True)
class Candidates:
    """Every child that was scored, in order of creation: by level, by rank of its parent, likeliest first.

    Candidates come in groups of `width`: the root's, then those of expansion 0, expansion 1, ... Number c stands in
    the group of expansion c // width - 1. They are arrays of the
    host: a beam is so small that each operation on it would take longer as one on tensors, and a wide one has thousands
    of candidates, which lists would take as long for as a small target's pass.
    """

    tokens: np.ndarray  # [C] int64
    scores: np.ndarray  # [C] float64, probability of the whole path
    expanded: np.ndarray  # [E] int64, expansion -> candidate
    width: int

    def best(self, count: int, *, planned: int = 0) -> Tree:
        """The tree of the `count` best, fewer where fewer are possible, of a cycle that planned so many levels."""
        chosen = np.sort(_likeliest(self.scores, count))
        # Candidate -> its node and its expansion. The entry after the last candidate stands for the root.
        node, expansion = (np.full(len(self.scores) + 1, ROOT) for _ in range(2))
        node[chosen], expansion[self.expanded] = np.arange(len(chosen)), np.arange(len(self.expanded))
        # The root's children are in group ROOT = -1, and Python's index -1 takes the last entry, the root's.
        above = np.append(self.expanded, len(self.scores))[chosen // self.width - 1]
        return Tree(
            torch.from_numpy(self.tokens[chosen]),
            tuple(node[above].tolist()), tuple(expansion[chosen].tolist()), planned=planned,
        )  # fmt: skip


_PLAIN = Draw("top-k")


def candidates(root: Tensor, expand: Expand, *, width: int, levels: int, draw: Draw = _PLAIN) -> Candidates:
    """Grow a beam: `levels - 1` times, expand the `width` best of the newest level. One synchronisation for each.

    Args:
        root: q [V] after the root, which need not have `width` possible tokens: impossible ones are never expanded.
        draw: its `ends` are never expanded, either.
    """
    width = min(width, root.shape[-1])
    newest, scores_of_newest = read_ranked(draw.ranked(root[None], width))
    tokens, scores, expanded = [newest.ravel()], [scores_of_newest.ravel()], [np.empty(0, dtype=np.int64)]
    ends, first = np.array(sorted(draw.ends), dtype=np.int64), 0  # `first` of the newest level
    for _ in range(levels - 1):
        going = np.where(np.isin(tokens[-1], ends), 0.0, scores[-1]) if len(ends) else scores[-1]
        beam = _likeliest(going, width)
        if not len(beam):
            break
        drafted = torch.from_numpy(tokens[-1][beam])  # the drafter takes them over with all that it needs
        parents = ((first + beam) // width - 1).tolist()
        below, probs = read_ranked(draw.ranked(expand(parents, drafted), width))
        # A probability rounded above 1 would score a child above its parent.
        reached = scores[-1][beam, None] * np.minimum(probs, 1.0)
        expanded.append(first + beam)
        first += len(scores[-1])
        tokens.append(below.ravel())
        scores.append(reached.ravel())
    joined = np.concatenate(tokens), np.concatenate(scores), np.concatenate(expanded)
    return Candidates(*joined, width)


def read_ranked(best: tuple[Tensor, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 and probabilities float64 [F,K] on the host, of probabilities and ids on the device, in one copy: ids
    are whole in float64, too.
    """
    values, ids = best
    if ids.device.type == "cpu":
        return ids.numpy(), values.double().numpy()
    both = torch.cat([ids.double(), values.double()], dim=-1).cpu().numpy()
    return both[:, : ids.shape[-1]].astype(np.int64), both[:, ids.shape[-1] :]


def _likeliest(scores: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` best scores that are possible at all, best first.

    The sort is stable: a sure child scores as its parent does, and the parent, which was created first, comes first.
    """
    ranked = np.argsort(-scores, kind="stable")[:count]
    return ranked[scores[ranked] > 0]


def most_written(num_nodes: int, *, depth: int, width: int) -> int:
    """Nodes of the tree, or expansions of the drafter where those are more: it expands D beams of K."""
    return max(min(num_nodes, width + depth * width * width), depth * width)


class DynamicTree(TreeSection):
    """EAGLE-2's settings. EAGLE's depth D is D + 1 levels, and its total counts the root: 4 and 60 are 59 nodes on 5
    levels.
    """

    kind: Literal["dynamic"]
    # Nodes with the root. More are accepted more often, until the target's pass gets slower. LANTERN's paper has 60
    # (appendix B.2), its released default 59.
    total: int = Field(60, ge=2, le=MOST_NODES)
    # Expansions; levels are one more. Deeper pays where long prefixes are accepted. EAGLE: 5 to 7, LANTERN: 4.
    depth: int = Field(4, ge=0, le=MOST_LEVELS)
    # Children of a node and nodes in the beam. Wider for flat distributions, as those of images.
    width: int = Field(10, ge=1, le=MOST_NODES)

    def build(self, *, grid: int | None = None, seed: int = 0) -> Dynamic:
        return Dynamic(self.total, self.depth, self.width)
