"""The best static tree for measured acceptance and times: how deep, how wide, and which nodes.

SAGE's model of the cost (equation 6) and of the expected length (theorem 4.6) as a tuner: it proposes a tree for a
target, a drafter and a device, and the evaluation says what it is worth. SAGE's Lemma 4.3 and Theorem 4.4 are false as
printed and are not used. Letters: L levels, W width, p target probability, T times in seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

Path = tuple[int, ...]
# [L][W]: probability that the child of a rank stands, given that its parent at that depth does.
Rates = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Costs:
    """Measured times of one cycle's parts. SAGE's equation 6 has `draft_node_s` and `verify_s` alone."""

    verify_s: float  # T_v, a target pass over few nodes
    draft_s: float = 0.0  # T_q, for each level
    draft_node_s: float = 0.0  # more for each node
    verify_node_s: float = 0.0  # more for each node: large trees make large passes

    def cycle_s(self, levels: int, nodes: int) -> float:
        """Seconds of a cycle that drafts `nodes` nodes on `levels` levels and verifies them."""
        return self.verify_s + levels * self.draft_s + nodes * (self.draft_node_s + self.verify_node_s)


@dataclass(frozen=True)
class Plan:
    """A static tree and what it is expected to give."""

    choices: tuple[Path, ...]  # for `tree: {kind: static, choices: ...}`
    accepted: float  # expected drafts that stand in a cycle, without the bonus token
    cycle_s: float
    speedup: float  # over plain decoding

    @property
    def levels(self) -> int:
        """Levels of the tree; 0 without nodes."""
        return max((len(path) for path in self.choices), default=0)

    @property
    def width(self) -> int:
        """Most children of a node."""
        return max((path[-1] + 1 for path in self.choices), default=0)


def plan(rates: Rates, costs: Costs, *, plain_s: float, most_nodes: int = 64) -> Plan:
    """The best tree with at most the levels and the width of `rates`; without nodes where drafting does not pay.

    Trees of each depth are filled with the likeliest paths first, a path's probability being the product of its rates:
    acceptance at a place depends on its depth and rank alone, which is the model's one assumption.

    Args:
        plain_s: T_p, a step of plain decoding.
    """
    nothing = Plan((), 0.0, costs.cycle_s(0, 0), plain_s / costs.cycle_s(0, 0))
    plans = [nothing]
    for levels in range(1, len(rates) + 1):
        accepted, chosen = 0.0, []
        for path, chance in likeliest_paths(rates[:levels], most_nodes):
            accepted += chance
            chosen.append(path)
            depth = max(map(len, chosen))
            seconds = costs.cycle_s(depth, len(chosen))
            plans.append(Plan(tuple(chosen), accepted, seconds, (accepted + 1) * plain_s / seconds))
    return max(plans, key=lambda candidate: candidate.speedup)


def likeliest_paths(rates: Rates, count: int) -> list[tuple[Path, float]]:
    """The `count` likeliest paths and their probabilities, parents before children, elder siblings before younger."""
    paths: list[tuple[Path, float]] = []
    waiting: list[tuple[float, int, Path, float]] = []

    def add(path: Path, parent: float) -> None:
        level, rank = len(path) - 1, path[-1]
        if level < len(rates) and rank < len(rates[level]) and (chance := parent * rates[level][rank]) > 0:
            heapq.heappush(waiting, (-chance, len(path), path, parent))

    add((0,), 1.0)
    while waiting and len(paths) < count:
        negative, _, path, parent = heapq.heappop(waiting)
        paths.append((path, -negative))
        add((*path[:-1], path[-1] + 1), parent)
        add((*path, 0), -negative)
    return paths
