"""What happened at every place that the target reached: how sure the drafter was, and which child was accepted.

`Watched` wraps any tree policy and changes nothing of it. From its record come SAGE's figures (acceptance by
confidence, autocorrelation of the entropy: its Figure 2) and the rates that the planner reads.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ...models.decoding.tree import ROOT, Tree
from ..policies import Draw, Expand, TreePolicy
from ..policies.draft_confidence import Drafted, confidence
from ..rules import Verified
from ..style import COLORS, GREY, lines, one_panel, save, styled

BINS, LAGS = 10, 10  # of the two figures


class Reached(NamedTuple):
    """A place under which nodes were proposed and verified: the root, or an accepted node with children."""

    depth: int  # of the node: 0 is the root
    children: int
    accepted: int | None  # rank of the child that stood; None: none did
    # Of the draft's distribution there: 1 less its entropy over the largest; None: it expanded no such node.
    confidence: float | None


class Watched:
    """A policy that remembers. `requests` holds one list of places for each request.

    Args:
        top_k: likeliest tokens that the confidence is taken over.
    """

    def __init__(self, policy: TreePolicy, *, top_k: int = 10):
        self.policy, self.top_k = policy, top_k
        self.name, self.prunes_by_token = policy.name, policy.prunes_by_token
        self.num_levels, self.max_nodes = policy.num_levels, policy.max_nodes
        self.requests: list[list[Reached]] = []
        self._drafted: Drafted | None = None

    def start(self) -> None:
        self.requests.append([])
        self._drafted = None
        self.policy.start()

    def grow(self, root: Tensor, expand: Expand, draw: Draw, *, max_levels: int) -> Tree:
        self._drafted = Drafted(root, self.top_k, draw)
        return self.policy.grow(root, self._drafted.watch(expand), draw, max_levels=max_levels)

    def observe(self, verified: Verified) -> None:
        drafted, self._drafted = self._drafted, None
        if drafted is not None and verified.tree is not None:
            places = reached(drafted, verified.tree, verified.path)
            # Where an end token stood it was neither refused nor did it save a pass.
            self.requests[-1] += places[:-1] if verified.ended else places
        self.policy.observe(verified)


def reached(drafted: Drafted, tree: Tree, path: Sequence[int]) -> list[Reached]:
    """The places of one cycle from the root down."""
    rows = drafted.reached(tree, path)
    sure = confidence(drafted.ranked(rows)).tolist()
    levels = []
    for depth, node in enumerate((ROOT, *path)):
        children = tree.children.get(node)
        if children:
            rank = children.index(path[depth]) if depth < len(path) else None
            levels.append(Reached(depth, len(children), rank, sure[depth] if depth < len(sure) else None))
    return levels


class Bin(NamedTuple):
    """Places whose confidence lies in [low, high)."""

    low: float
    high: float
    places: int
    likeliest: float  # share of them where the likeliest child stood
    any: float  # where some child stood


def by_confidence(places: Iterable[Reached]) -> list[Bin]:
    """Acceptance against confidence, the premise of SAGE; bins without a place are left out."""
    groups: list[list[Reached]] = [[] for _ in range(BINS)]
    for place in places:
        if place.confidence is not None:
            groups[min(BINS - 1, int(place.confidence * BINS))].append(place)
    return [
        Bin(
            number / BINS,
            (number + 1) / BINS,
            len(group),
            sum(place.accepted == 0 for place in group) / len(group),
            sum(place.accepted is not None for place in group) / len(group),
        )
        for number, group in enumerate(groups)
        if group
    ]


class Lag(NamedTuple):
    lag: int  # cycles
    correlation: float  # Pearson's
    pairs: int


def entropy_autocorrelation(requests: Iterable[Sequence[Reached]]) -> list[Lag]:
    """The autocorrelation of the root's entropy from cycle to cycle (Figure 2); pairs of one request each, pooled.

    A lag without two different values has no correlation and is left out.
    """
    series = [[1.0 - p.confidence for p in places if p.depth == 0 and p.confidence is not None] for places in requests]
    results = []
    for lag in range(1, LAGS + 1):
        pairs = [pair for values in series for pair in zip(values, values[lag:], strict=False)]
        first, second = [a for a, _ in pairs], [b for _, b in pairs]
        if len(set(first)) > 1 and len(set(second)) > 1:
            results.append(Lag(lag, statistics.correlation(first, second), len(pairs)))
    return results


def rates_by_rank(places: Iterable[Reached], *, levels: int, width: int) -> list[list[float | None]]:
    """[levels][width]: how often the child of a rank stood, of the places of a depth that had one of that rank.

    None where no place had one: it was not measured.
    """
    offered: Counter[tuple[int, int]] = Counter()
    stood: Counter[tuple[int, int]] = Counter()
    for place in places:
        for rank in range(place.children):
            offered[place.depth, rank] += 1
            stood[place.depth, rank] += place.accepted == rank
    return [
        [stood[depth, rank] / of if (of := offered[depth, rank]) else None for rank in range(width)]
        for depth in range(levels)
    ]


@styled
def plot_acceptance(path: Path, drafters: Mapping[str, Sequence[Bin]]) -> None:
    """Share of places where the likeliest child stood, and (dashed) where any did, by the draft's confidence there."""
    assert len(drafters) <= len(COLORS), f"{len(drafters)} drafters, and {len(COLORS)} colours"
    figure, panel = one_panel((5.6, 3.6))
    most = max((b.places for bins in drafters.values() for b in bins), default=1)
    for color, (name, bins) in zip(COLORS, drafters.items(), strict=False):
        xs, sizes = [(b.low + b.high) / 2 for b in bins], [8 + 60 * b.places / most for b in bins]
        panel.plot(xs, [b.likeliest for b in bins], "-", color=color, label=name)
        panel.scatter(xs, [b.likeliest for b in bins], sizes, color=color)
        panel.plot(xs, [b.any for b in bins], "--", color=color, linewidth=1)
    panel.set(xlabel="confidence of the draft's distribution", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1.02))
    panel.grid(alpha=0.25)
    panel.set_title("accepted: likeliest child (line), any child (dashed); dots by number of places")
    panel.legend(loc="lower right")
    save(figure, path)


@styled
def plot_autocorrelation(path: Path, drafters: Mapping[str, Sequence[Lag]]) -> None:
    """Pearson's correlation of the draft's entropy between cycles (SAGE, figure 2)."""
    figure, panel = one_panel((5.6, 3.2))
    lines(panel, {name: ([lag.lag for lag in of], [lag.correlation for lag in of]) for name, of in drafters.items()})
    panel.axhline(0.0, color=GREY, linewidth=1)
    panel.set(xlabel="cycles between the two", ylabel="correlation of the entropy")
    panel.grid(alpha=0.25)
    panel.legend()
    save(figure, path)
