"""EAGLE-2's dynamic tree: a beam of the likeliest prefixes, of whose children the best become the tree.

The shape depends on the draft's distributions and never on the verification, so it is exact with top-k draws;
dropping drawn nodes by their scores makes it inexact with sampled ones.
Source: EAGLE-2, expansion and reranking phases; LANTERN uses it as it is.
Letters: C candidates, D expansions, F nodes expanded at once, K width, N nodes without the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ...core.section import Section
from ...models.decoding.tree import ROOT, Tree
from ..rules import Verified
from .base import Draw, Expand


class Dynamic:
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

    def start(self) -> None:
        return None

    def grow(self, root: Tensor, expand: Expand, draw: Draw, *, max_levels: int) -> Tree:
        assert not draw.sampled, "check_combination refuses this"
        levels = min(self.num_levels, max_levels)
        beam = candidates(root, expand, width=self.width, levels=levels, ends=draw.ends)
        return beam.best(self.num_nodes, planned=self.num_levels)

    def observe(self, verified: Verified) -> None:
        return None


@dataclass(frozen=True)
class Candidates:
    """Every child that was scored, in order of creation: by level, by rank of its parent, likeliest first.

    Candidates come in groups of `width`: the root's, then those of expansion 0, expansion 1, ... They are plain
    numbers: a beam is so small that each operation on it would take longer as one on tensors.
    """

    tokens: list[int]  # C
    scores: list[float]  # C, probability of the whole path
    expanded: tuple[int, ...]  # expansion -> candidate
    width: int
    device: torch.device

    def parent(self, candidate: int) -> int:
        """The candidate above, or ROOT."""
        expansion = parent_expansion(candidate, self.width)
        return ROOT if expansion == ROOT else self.expanded[expansion]

    def best(self, count: int, *, planned: int = 0) -> Tree:
        """The tree of the `count` best, fewer where fewer are possible, of a cycle that planned so many levels."""
        chosen = sorted(_likeliest(self.scores, count))
        node = {candidate: index for index, candidate in enumerate(chosen)}
        expansion = {candidate: index for index, candidate in enumerate(self.expanded)}
        parents = (self.parent(candidate) for candidate in chosen)
        return Tree(
            torch.tensor([self.tokens[candidate] for candidate in chosen], dtype=torch.int64, device=self.device),
            tuple(ROOT if parent == ROOT else node[parent] for parent in parents),
            tuple(expansion.get(candidate, ROOT) for candidate in chosen),
            planned=planned,
        )


def candidates(root: Tensor, expand: Expand, *, width: int, levels: int, ends: Collection[int] = ()) -> Candidates:
    """Grow a beam: `levels - 1` times, expand the `width` best of the newest level. One synchronisation for each.

    Args:
        root: q [V] after the root, which need not have `width` possible tokens: impossible ones are never expanded.
        ends: tokens that end an answer; they are never expanded, either.
    """
    width = min(width, root.shape[-1])
    (tokens,), (scores,) = read_ranked(root[None].topk(width))
    expanded: list[int] = []
    first = 0  # of the newest level
    for _ in range(levels - 1):
        going = [0.0 if t in ends else s for t, s in zip(tokens[first:], scores[first:], strict=True)]
        beam = [first + place for place in _likeliest(going, width)]
        if not beam:
            break
        drafted = torch.tensor([tokens[node] for node in beam], dtype=torch.int64, device=root.device)
        below, probs_below = read_ranked(
            expand([parent_expansion(node, width) for node in beam], drafted).topk(width, dim=-1)
        )
        expanded += beam
        first = len(scores)
        for node, children, probs in zip(beam, below, probs_below, strict=True):
            # A probability rounded above 1 would score a child above its parent.
            scores += [scores[node] * min(p, 1.0) for p in probs]
            tokens += children
    return Candidates(tokens, scores, tuple(expanded), width, root.device)


def read_ranked(best: torch.return_types.topk) -> tuple[list[list[int]], list[list[float]]]:
    """Indices and values [F,K] as numbers, in one copy: ids are whole in float64, too."""
    width = best.values.shape[-1]
    rows = torch.cat([best.indices.double(), best.values.double()], dim=-1).tolist()
    return [[int(i) for i in row[:width]] for row in rows], [row[width:] for row in rows]


def _likeliest(scores: Sequence[float], count: int) -> list[int]:
    """Places of the `count` best scores that are possible at all, best first.

    The sort is stable: a sure child scores as its parent does, and the parent, which was created first, comes first.
    """
    ranked = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[:count]
    return [place for place in ranked if scores[place] > 0]


def parent_expansion(candidate: int, width: int) -> int:
    """The expansion whose group a candidate stands in; the first group is the root's."""
    return candidate // width - 1


def most_written(num_nodes: int, *, depth: int, width: int) -> int:
    """Nodes of the tree, or expansions of the drafter where those are more: it expands D beams of K."""
    return max(min(num_nodes, width + depth * width * width), depth * width)


class DynamicTree(Section):
    """EAGLE-2's settings. EAGLE's depth D is D + 1 levels, and its total counts the root: 4 and 60 are 59 nodes on 5
    levels.
    """

    kind: Literal["dynamic"]
    # Nodes with the root. More are accepted more often, until the target's pass gets slower. LANTERN's paper has 60
    # (appendix B.2), its released default 59.
    total: int = Field(60, ge=2)
    # Expansions; levels are one more. Deeper pays where long prefixes are accepted. EAGLE: 5 to 7, LANTERN: 4.
    depth: int = Field(4, ge=0)
    # Children of a node and nodes in the beam. Wider for flat distributions, as those of images.
    width: int = Field(10, ge=1)

    def build(self, *, grid: int | None = None, seed: int = 0) -> Dynamic:
        """EAGLE-2's policy with these settings; `grid` and `seed` change nothing."""
        return Dynamic(self.total, self.depth, self.width)
