"""The best static tree for measured acceptance and times: how deep, how wide, and which nodes.

SAGE's model of the cost (equation 6) and of the expected length (theorem 4.6) as a tuner: it proposes a tree for a
target, a drafter and a device, and the evaluation says what it is worth. SAGE's Lemma 4.3 and Theorem 4.4 are false as
printed and are not used. Letters: L levels, W width, p target probability, T times in seconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .measure import Row, by_depth

Path = tuple[int, ...]
# [L][W]: probability that the child of a rank stands, given that its parent at that depth does.
Rates = Sequence[Sequence[float]]


def expected_accepted(p: float, gamma: float, depth: int) -> float:
    """Drafts that stand of a chain whose l-th is accepted with probability p gamma^(l-1) (equation 15)."""
    return sum(p**level * gamma ** (level * (level - 1) / 2) for level in range(1, depth + 1))


def optimal_depth(p: float, cost_ratio: float, *, form: Literal["proof", "theorem"] = "proof") -> int:
    """Theorem 4.7's depth of a chain for c_t / c_d = `cost_ratio`, at which one more draft costs what it gains.

    The proof ends with floor(x), the theorem prints ceil(x - 1) (x = ln(c_t / c_d) / ln(1 / p)), which is one less
    where x is whole. Both weigh a draft against a verification alone: `plan` maximises the speedup itself.
    """
    assert 0 < p < 1 and cost_ratio > 0, (p, cost_ratio)
    depth = math.log(cost_ratio) / math.log(1 / p)
    return max(0, math.floor(depth) if form == "proof" else math.ceil(depth - 1))


def decay(rates: Sequence[float], counts: Sequence[float]) -> tuple[float, float]:
    """(p, gamma) of p gamma^(l-1), by least squares on the logarithms of measured rates, weighted by their counts.

    It carries the rates on to depths that were not drafted. Rates of 0 or without a count are left out; one rate alone
    gives gamma 1. gamma is at most 1.
    """
    points = [(level, math.log(r), c) for level, (r, c) in enumerate(zip(rates, counts, strict=True)) if r > 0 and c]
    assert points, "no draft was accepted: nothing to plan with"
    weight = sum(c for _, _, c in points)
    mean_x = sum(c * x for x, _, c in points) / weight
    mean_y = sum(c * y for _, y, c in points) / weight
    spread = sum(c * (x - mean_x) ** 2 for x, _, c in points)
    slope = sum(c * (x - mean_x) * (y - mean_y) for x, y, c in points) / spread if spread else 0.0
    slope = min(0.0, slope)
    return min(1.0, math.exp(mean_y - slope * mean_x)), math.exp(slope)


def chain_rates(rows: Sequence[Row], *, drafted: int, levels: int) -> list[list[float]]:
    """Rates of a chain, one wide: measured to `drafted` levels by the rows of a report, carried on beyond them."""
    depths = by_depth(rows, drafted)
    rates = [d["share_of_reached"] for d in depths]
    # Those reached at a depth are those accepted at the one before.
    counts = [d["share"] * d["drafted"] / rate if rate else 0.0 for d, rate in zip(depths, rates, strict=True)]
    p, gamma = decay(rates, counts)
    return [[rates[level] if level < drafted else p * gamma**level] for level in range(levels)]


@dataclass(frozen=True)
class Costs:
    """Measured times of one cycle's parts. SAGE's equation 6 has `draft_node_s` and `verify_s` alone."""

    verify_s: float  # T_v, a target pass over few nodes
    draft_s: float = 0.0  # T_q, for each level
    draft_node_s: float = 0.0  # more for each node
    verify_node_s: float = 0.0  # more for each node: large trees make large passes

    def cycle_s(self, levels: int, nodes: int) -> float:
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
    return max(plans, key=lambda found: found.speedup)


def likeliest_paths(rates: Rates, count: int) -> list[tuple[Path, float]]:
    """The `count` likeliest paths and their probabilities, parents before children, elder siblings before younger."""
    found: list[tuple[Path, float]] = []
    waiting: list[tuple[float, int, Path, float]] = []

    def add(path: Path, parent: float) -> None:
        level, rank = len(path) - 1, path[-1]
        if level < len(rates) and rank < len(rates[level]) and (chance := parent * rates[level][rank]) > 0:
            heapq.heappush(waiting, (-chance, len(path), path, parent))

    add((0,), 1.0)
    while waiting and len(found) < count:
        negative, _, path, parent = heapq.heappop(waiting)
        found.append((path, -negative))
        add((*path[:-1], path[-1] + 1), parent)
        add((*path, 0), -negative)
    return found
