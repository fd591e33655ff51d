"""Whether near codes of the codebook are interchangeable, and how much LANTERN gains from it.

Drawing with every token replaced by a near one (section 4.1, appendix C), patches of near and far codes (figure 6), and
the tables of a sweep over k, delta and temperature (tables 3, 7, 10 and 11). Scripts of the same names write them.
Letters: C codes, d their width, n codes shown or cells of a picture, N drafts, V vocabulary, G cells along a side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from draftsmith.core.batch import ImageRequest
from draftsmith.eval.intervals import bootstrap
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Greedy, inverse_cdf
from draftsmith.eval.tables import Column, Table, Value, text
from draftsmith.models.decoding.neighbours import Metric, NeighbourTable
from draftsmith.models.decoding.tree import Tree
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.targets.base import Taps, TargetStep
from torch import Tensor

# ---- drawing with near codes


class Replacing:
    """A target whose every token is replaced by a uniform draw among the k nearest codes, as soon as it is drawn.

    The token itself is one of them, as in the paper's own B_k (section 4.2): k = 1 is plain decoding. The scores it
    answers with are certain of the replaced token, so the loop writes that one back and goes on from it. Each token
    takes two uniforms for every k, so that pictures of different k use the same random numbers.

    Args:
        generator: on the CPU.
    """

    def __init__(self, target: Any, warp: Warp, table: NeighbourTable, k: int, generator: torch.Generator):
        assert 1 <= k <= table.num_neighbours + 1, (k, table.num_neighbours)
        self.target, self.warp, self.table, self.k, self.generator = target, warp, table, k, generator
        self.vocab_size: int = target.vocab_size
        self.device: torch.device = target.device

    def prefill(self, request: ImageRequest, taps: Taps, *, capacity: int) -> tuple[Any, TargetStep]:
        session, step = self.target.prefill(request, taps, capacity=capacity)
        return session, replace(step, logits=self._certain(step.logits[-1]))

    def verify(self, session: Any, root: int, tree: Tree) -> TargetStep:
        assert tree.num_nodes == 0, "nothing is drafted"
        step = self.target.verify(session, root, tree)
        return replace(step, logits=self._certain(step.logits[0]))

    def commit(self, session: Any, path: Sequence[int]) -> None:
        self.target.commit(session, path)

    def _certain(self, logits: Tensor) -> Tensor:
        """[V] -> [1,V]: zero at the replaced token, minus infinity elsewhere."""
        token, place = torch.rand(2, generator=self.generator, dtype=torch.float64).tolist()
        drawn = int(logits.argmax()) if self.warp.greedy else inverse_cdf(self.warp(logits), token)
        rank = int(place * self.k)  # 0 is the token itself
        if rank > 0:
            near, known = self.table.of(torch.tensor([drawn], device=self.table.codes.device), rank)
            drawn = int(near[0, -1]) if bool(known[0]) else drawn
        certain = torch.full((1, len(logits)), float("-inf"), device=logits.device)
        certain[0, drawn] = 0.0
        return certain


def draw_replaced(
    target: Any, request: ImageRequest, warp: Warp, table: NeighbourTable, k: int, generator: torch.Generator
) -> list[int]:
    """A picture's tokens, each replaced by one of its k nearest; `table` lies where the scores do."""
    # The draws are made inside the target: what is left to the loop is greedy.
    decoding = Decoding(Chain(1), Greedy(), Draw("top-k"), Warp(), target.num_codes, ())
    replacing: Any = Replacing(target, warp, table, k, generator)  # a target in what plain decoding asks of one
    return generate(replacing, None, request, decoding).tokens


# ---- codes as patches


def spread(drawn: Tensor, count: int) -> Tensor:
    """Up to `count` distinct codes of those `drawn` [...], evenly by rank from the most often drawn to the rarest."""
    codes, counts = drawn.unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True)
    picks = torch.linspace(0, len(codes) - 1, min(count, len(codes))).round().long()
    return codes[order[picks]]


def extremes(codebook: Tensor, codes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The nearest and the farthest other codes [n,count] of `codes` [n] in `codebook` [C,d], most extreme first."""
    assert 1 <= count < len(codebook), (count, len(codebook))
    points = codebook.detach().double()
    distances = torch.cdist(points[codes], points, compute_mode="donot_use_mm_for_euclid_dist")
    distances[torch.arange(len(codes)), codes] = -1.0  # before a duplicate of it
    order = distances.argsort(dim=-1, stable=True)
    return order[:, 1 : count + 1], order[:, -count:].flip(-1)


def patches(pictures: Callable[[Tensor], Tensor], codes: Tensor, grid: int) -> Tensor:
    """uint8 [n,3,f,f]: the pixels of the centre cell of a picture that consists of one code of `codes` [n] alone.

    A decoder's convolutions see the cells around: filled with the same code, they add nothing of another one.
    """
    drawn = pictures(codes[:, None].expand(-1, grid * grid))
    side = drawn.shape[-1] // grid
    start = grid // 2 * side
    return drawn[:, :, start : start + side, start : start + side]


# ---- settings of a sweep

Bound = Literal["delta", "lambda"]


@dataclass(frozen=True)
class Setting:
    """One way of relaxing acceptance: by LANTERN's bound, delta, or by LANTERN++'s, lambda."""

    k: int
    limit: float  # the bound's value
    metric: Metric = "l2"
    divergence: str = "tvd"
    bound: Bound = "delta"

    @property
    def name(self) -> str:
        """k and the bound; the metric and the divergence only where they are not l2 and tvd."""
        measures = [m for m, usual in ((self.metric, "l2"), (self.divergence, "tvd")) if m != usual]
        return ", ".join([f"k={self.k}, {self.bound}={self.limit:g}", *measures])

    @property
    def rule(self) -> dict[str, Any]:
        """The rule as a recipe spells it."""
        multiplicative = {"bound": "multiplicative"} if self.bound == "lambda" else {}
        return {"kind": "lantern", **self.to_json(), **multiplicative}

    def to_json(self) -> dict[str, Any]:
        """The setting as `sweep.json` lists it."""
        return {"k": self.k, self.bound: self.limit, "metric": self.metric, "divergence": self.divergence}


@dataclass(frozen=True)
class Point:
    """A method at one temperature, measured: a row of the report."""

    table: Mapping[str, Any]  # a cell of report.json: `Summary.to_json`
    quality: Mapping[str, Mapping[str, Any]]  # metric -> value, n, what, spread


def point_of(report: Mapping[str, Any], temperature: float, method: str) -> Point:
    """A method of a `report.json` with scores."""
    (cell,) = (c for c in report["cells"] if (c["method"], c["temperature"]) == (method, temperature))
    return Point(cell, scores_of(report, temperature, method))


def scores_of(report: Mapping[str, Any], temperature: float, method: str) -> Mapping[str, Mapping[str, Any]]:
    """Metric -> value, n, what, spread; of plain decoding, too."""
    scores: Mapping[str, Mapping[str, Any]] = report["quality"][f"{temperature:g}"][method]
    return scores


Spread = tuple[float, float]


@dataclass(frozen=True)
class Measure:
    """What a table shows of a point."""

    name: str
    value: Callable[[Point], Value]
    unit: str = ""
    kind: Literal["text", "interval"] = "interval"

    def column(self, name: str) -> Column:
        """A column of this measure's values."""
        return Column(name, unit=self.unit, kind=self.kind, ranked=False)


SPEEDUP = Measure("speedup [quartiles]", lambda point: (point.table["ESR"], *point.table["ESR_spread"]), "x")
TAU = Measure("tau [95%]", lambda point: (point.table["tau"], *point.table["tau_interval"]))


def quality(metric: str, *, with_n: bool = False) -> Measure:
    """A point's score in `metric`, with ± its spread where that is known."""

    def value(point: Point) -> str:
        score = point.quality[metric]
        error = "" if score["spread"] is None else f" ± {score['spread']:.2g}"
        return f"{score['value']:.4g}{error}" + (f" (n={score['n']})" if with_n else "")

    return Measure(metric, value, kind="text")


def grid_table(
    points: Mapping[Setting, Point],
    ks: Sequence[int],
    limits: Sequence[float],
    measure: Measure,
    references: Mapping[str, Value],
) -> Table:
    """k down, the bound across, as tables 10 and 11; points of one bound, metric and divergence.

    Args:
        references: name -> value of what has neither k nor a bound.
    """
    (bound,) = {s.bound for s in points}
    by_place = {(s.k, s.limit): measure.value(point) for s, point in points.items()}
    blank = [""] * (len(limits) - 1)
    rows: list[tuple[Value, ...]] = [(name, value, *blank) for name, value in references.items()]
    rows += [(f"k = {k}", *(by_place[k, limit] for limit in limits)) for k in ks]
    return Table("", (text(""), *(measure.column(f"{bound} = {limit:g}") for limit in limits)), tuple(rows))


def measures_table(points: Mapping[Setting, Point], metrics: Sequence[str]) -> Table:
    """A setting in a row, as table 3: tau, speedup, and quality by each of `metrics` with its n."""
    measures = [TAU, SPEEDUP, *(quality(metric, with_n=True) for metric in metrics)]
    rows = tuple((s.name, *(measure.value(point) for measure in measures)) for s, point in points.items())
    return Table("", (text(""), *(measure.column(measure.name) for measure in measures)), rows)


# ---- speedup and the number of captions


def speedups(plain_s: Sequence[float], total_s: Sequence[float], counts: Sequence[int]) -> list[tuple[float, Spread]]:
    """Speedup over the first `counts` captions of a run, with its 95% interval over resampled captions (table 7).

    Args:
        plain_s, total_s: seconds of each caption, plainly and by the method (a row's `plain_total_s` and `total_s`).
    """
    spreads = []
    for count in counts:
        assert 1 <= count <= len(plain_s), (count, len(plain_s))
        plain, own = plain_s[:count], total_s[:count]
        spreads.append((sum(plain) / sum(own), bootstrap(plain, own)))
    return spreads


def counts_table(counts: Sequence[int], columns: Mapping[str, Sequence[tuple[float, Spread]]]) -> Table:
    """Captions down, settings across, as table 7."""
    rows: list[tuple[Value, ...]] = []
    for place, count in enumerate(counts):
        cells = (column[place] for column in columns.values())
        rows.append((count, *((value, *ends) for value, ends in cells)))
    shown = (Column(name, unit="x", kind="interval", ranked=False) for name in columns)
    return Table("", (Column("captions", "d"), *shown), tuple(rows))
