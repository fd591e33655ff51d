"""SAGE's sizing rules: depth and width of a tree at a given confidence, and which nodes it then holds.

Pure functions of numbers, without a drafter. Source: SAGE, equations 10 to 12, the threshold of section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from ...core.fields import MOST_LEVELS, MOST_NODES
from ...core.section import Section


class SizingSettings(Section):
    """Settings of the sizing rules; numbers are the paper's."""

    # Likeliest tokens that the entropy is taken over, and the most children of a node.
    top_k: int = Field(10, ge=2, le=MOST_NODES)
    # Levels of the tree at confidence 0 and 1, and children of the root (before the decay) at 1 and 0.
    min_depth: int = Field(3, ge=1)
    max_depth: int = Field(8, ge=1, le=MOST_LEVELS)
    min_width: int = Field(2, ge=1)
    max_width: int = Field(10, ge=1, le=MOST_NODES)
    # Most nodes, without the root.
    max_nodes: int = Field(64, ge=1, le=MOST_NODES)
    # The probability that must exceed the threshold, and that P_parent stands for. cumulative: of the whole path (the
    # paper's formal line); the tree seldom exceeds 16 nodes. local: of the token alone (its text); it fills max_nodes.
    threshold: Literal["cumulative", "local"] = "cumulative"
    # Probabilities of the k likeliest tokens in the tree: the draft's own, or renormalised over k as for the entropy.
    probabilities: Literal["raw", "renormalised"] = "raw"
    # Of the number of children. "p_l < W_l" of the paper's formal line counts up; at least 1 either way.
    rounding: Literal["ceil", "floor"] = "ceil"
    # Of the depth; thresholds take it unrounded.
    depth_rounding: Literal["nearest", "floor"] = "nearest"
    # Which nodes remain at max_nodes: the likeliest paths, or the first ones of a depth-first walk.
    order: Literal["best-first", "depth-first"] = "best-first"
    # Children of the root: root gives it P_parent = 1 (1.5 W), plain takes W as it is.
    first_level: Literal["root", "plain"] = "root"

    @model_validator(mode="after")
    def _ordered(self) -> SizingSettings:
        depths, widths = (self.min_depth, self.max_depth), (self.min_width, self.max_width)
        for name, (low, high) in {"depth": depths, "width": widths}.items():
            if low > high:
                raise ValueError(f"min_{name} {low} is above max_{name} {high}")
        return self


class Node(NamedTuple):
    """A node by the ranks along its path; probabilities of the path and of its last token."""

    path: tuple[int, ...]
    cumulative: float
    local: float


# A whole number that floats put a little aside is that number.
_WHOLE = 1e-9


@dataclass(frozen=True)
class SizingRules:
    """One cycle's depth D(alpha) and width W(alpha), and what follows from them."""

    settings: SizingSettings
    depth: float
    width: float

    @classmethod
    def of(cls, settings: SizingSettings, alpha: float, *, cap: int) -> SizingRules:
        """`cap` is D_max, which history moves."""
        return cls(
            settings,
            settings.min_depth + alpha * (cap - settings.min_depth),
            settings.min_width + (1.0 - alpha) * (settings.max_width - settings.min_width),
        )

    @property
    def levels(self) -> int:
        """Levels of the tree: the depth as a whole number, rounded as `depth_rounding` says."""
        return int(self.depth + (0.5 if self.settings.depth_rounding == "nearest" else _WHOLE))

    def threshold_at(self, level: int) -> float:
        """The probability that a node at `level` must exceed to be in the tree."""
        return 0.1 * level / self.depth

    def width_at(self, level: int, parent: float) -> float:
        """W_l of a node at `level` - 1 whose probability is `parent` (the root's is 1)."""
        plain = level == 1 and self.settings.first_level == "plain"
        return self.width if plain else self.width / level * (0.5 + parent)

    def num_children(self, level: int, parent: float) -> int:
        """At least 1: W_l falls below that from the third level on."""
        return self._count(self.width_at(level, parent))

    @property
    def beam(self) -> int:
        """W itself as a number of nodes, for a tree that knows no decay."""
        return self._count(self.width)

    def _count(self, wide: float) -> int:
        whole = math.ceil(wide - _WHOLE) if self.settings.rounding == "ceil" else math.floor(wide + _WHOLE)
        return min(self.settings.top_k, max(1, whole))

    def children(self, node: Node, ranked: Sequence[float]) -> Iterator[Node]:
        """Those above the threshold, likeliest first.

        Args:
            ranked: the draft's probabilities after `node`, in descending order.
        """
        level, is_local = len(node.path) + 1, self.settings.threshold == "local"
        count = self.num_children(level, node.local if is_local else node.cumulative)
        if self.settings.probabilities == "renormalised" and (total := sum(ranked)):
            ranked = [probability / total for probability in ranked]
        for rank, probability in enumerate(ranked[:count]):
            child = Node((*node.path, rank), node.cumulative * probability, probability)
            if (child.local if is_local else child.cumulative) <= self.threshold_at(level):
                return
            yield child

    def may_have_children(self, node: Node) -> bool:
        """False where no child can exceed the next level's threshold."""
        return self.settings.threshold == "local" or node.cumulative > self.threshold_at(len(node.path) + 1)

    def first(self, nodes: list[Node]) -> list[Node]:
        """The first `max_nodes` in the order of filling, in which a node stands after its parent."""
        if self.settings.order == "depth-first":
            return sorted(nodes, key=lambda node: node.path)[: self.settings.max_nodes]
        return sorted(nodes, key=lambda node: (-node.cumulative, len(node.path), node.path))[: self.settings.max_nodes]


def grow_nodes(
    sizing: SizingRules,
    first: Sequence[float],
    below: Callable[[Sequence[Node]], Sequence[Sequence[float]]],
    *,
    levels: int,
) -> list[Node]:
    """The nodes of a tree, at most `levels` deep; none where nothing exceeds the threshold.

    Level by level. What falls out of the first `max_nodes` never comes back, as deeper levels only add nodes, and
    nothing grows below it: the result is that of filling one node at a time.

    Args:
        first: probabilities of the root's children, likeliest first.
        below: the same for each of some nodes of one level.
    """
    chosen: list[Node] = []
    newest, ranked = [Node((), 1.0, 1.0)], [first]
    for level in range(1, levels + 1):
        children = [child for node, probs in zip(newest, ranked, strict=True) for child in sizing.children(node, probs)]
        chosen = sizing.first([*chosen, *children])
        newest = [node for node in chosen if len(node.path) == level]
        if not newest or level == levels:
            break
        ranked = list(below(newest))
    return chosen
