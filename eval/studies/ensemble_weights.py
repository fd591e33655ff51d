"""An ensemble's weights while it decodes, against all weights that would have been right (TABED, figures 3 and 4).

The shade at a step holds every weight between two members (M and T, where they are members) whose likeliest token the
target takes; a good rule stays inside it. Letters: S steps, G weights on the line between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...core.batch import Request
from ...models.drafters.ensemble import EnsembleProposal, WeightTrace
from ...models.targets.base import Target
from ..loop import Decoding, generate
from ..style import INK, WIDEST, panel_grid, save, styled
from ..tables import Column, Figure, ReportSection, Table, Value, text

SHADE, UNDRAFTED, LINE = "#8FD3BC", "#D0D0D0", INK  # a pale GREEN, which a dark line crosses


@dataclass(frozen=True)
class WeightsOverTime:
    """One request's curve."""

    names: tuple[str, str]  # the two members
    steps: np.ndarray  # [S] tokens of the output that were drafted for
    weight: np.ndarray  # [S] the first one's share of the two; not a number where both have none
    line: np.ndarray  # [G] shares that were tried
    accepted: np.ndarray  # [S,G] bool: whether the target takes the mixture's likeliest token

    @property
    def known(self) -> np.ndarray:
        """[S] bool: steps at which one of the two members has a weight."""
        return ~np.isnan(self.weight)

    def taken(self, weight: float | None = None) -> int:
        """Known steps whose token, by the nearest share on the line, the target takes.

        Args:
            weight: that stays the same; None: the one in use at each step.
        """
        used = self.weight[self.known] if weight is None else np.full(self.known.sum(), weight)
        nearest = np.abs(self.line[None] - used[:, None]).argmin(1)
        return int(self.accepted[self.known][np.arange(len(used)), nearest].sum())


@dataclass(frozen=True)
class WeightsFigure:
    """One picture of weights: some requests of a set, decoded by one ensemble of a drafter's modes."""

    path: str  # relative to the report
    place: str  # the set, its turn and visual tokens
    drafter: str
    method: str
    curves: Mapping[str, WeightsOverTime]


def weights_section(figures: Sequence[WeightsFigure]) -> ReportSection:
    """TABED's figures 3 and 4, and how often the weights in use were among those that would have been right.

    MT, M and T beside it are the constant weights 0.5, 1 and 0 of the same steps.
    """
    lines: list[tuple[Value, ...]] = []
    for figure in figures:
        curves = figure.curves.values()
        steps = sum(int(curve.known.sum()) for curve in curves)
        taken = (sum(curve.taken(weight) for curve in curves) for weight in (None, 1.0, 0.5, 0.0))
        shares = [count / steps if steps else None for count in taken]
        lines.append((figure.place, figure.drafter, figure.method, len(curves), steps, *shares))
    columns = (text("set"), text("drafter"), text("method"), Column("requests", "d"), Column("steps", "d"),
               Column("its weights", ".1%"), Column("weight 1", ".1%"), Column("weight 0.5", ".1%"),
               Column("weight 0", ".1%"))  # fmt: skip
    note = ("Share of the drafted tokens at which the target accepts the mixture's likeliest token, with the weights "
            "in use and with fixed weights (1: the first member alone, 0: the second alone, 0.5: both equally). For "
            "more than two members the table shows two of them, with their weights scaled to sum to 1.")  # fmt: skip
    table = Table("", columns, tuple(lines), source="TABED, figures 3 and 4", note=note)
    drawn = (Figure(figure.path, f"{figure.place}: {figure.method} of {figure.drafter}") for figure in figures)
    return ReportSection("Weights over time", (table, *drawn), "weights")


def trace_weights(
    target: Target,
    drafter: EnsembleProposal,
    request: Request,
    decoding: Decoding,
    generator: torch.Generator | None = None,
) -> WeightTrace:
    """Decode once more with the trace on: it waits for the device in each cycle, which no measurement should."""
    before, drafter.record = drafter.record, True
    try:
        generate(target, drafter, request, decoding, generator)
    finally:
        drafter.record = before
    assert drafter.trace is not None
    return drafter.trace


def weights_over_time(kept: WeightTrace) -> WeightsOverTime:
    """The curve of a trace."""
    first, second = kept.pair
    weights = np.array([kept.cycles[c] for c in kept.cycle_of_step], dtype=float).reshape(-1, len(kept.members))
    total = weights[:, first] + weights[:, second]
    share = np.divide(weights[:, first], total, out=np.full(len(total), np.nan), where=total > 0)
    return WeightsOverTime(
        (kept.members[first], kept.members[second]),
        np.array(kept.steps, dtype=int),
        share,
        np.array(kept.line),
        np.array(kept.accepted, dtype=bool).reshape(-1, len(kept.line)),
    )


@styled
def plot_weights(path: Path, curves: Mapping[str, WeightsOverTime]) -> None:
    """One panel for each request, under its title. Steps that nothing was drafted for are grey and break no line."""
    assert curves, "nothing to draw"
    figure, panels = panel_grid(len(curves), 1, (WIDEST, 2.1 * len(curves) + 0.5))
    for panel, (title, curve) in zip(panels[:, 0], curves.items(), strict=True):
        half = (curve.line[1] - curve.line[0]) / 2
        for step in set(range(1, curve.steps.max(initial=0))) - set(curve.steps.tolist()):
            panel.axvspan(step - 0.5, step + 0.5, color=UNDRAFTED, linewidth=0)
        for step, taken in zip(curve.steps, curve.accepted, strict=True):
            for place in curve.line[taken]:
                low, high = max(0.0, place - half), min(1.0, place + half)
                panel.fill_between([step - 0.5, step + 0.5], low, high, color=SHADE, linewidth=0)
        for share in (0.0, 0.5, 1.0):
            panel.axhline(share, color="black", linewidth=0.6, linestyle=":")
        (line,) = panel.plot(curve.steps, curve.weight, color=LINE, linewidth=1.8, drawstyle="steps-mid")
        first, second = curve.names
        panel.set(ylim=(-0.04, 1.04), yticks=(0, 0.5, 1), title=title, ylabel=f"weight of {first}")
        panel.set_yticklabels([f"0 ({second})", f"0.5 ({first}{second})", f"1 ({first})"])
    panels[-1, 0].set_xlabel("token of the output")
    areas = [panels[-1, 0].fill_between([], [], color=color, linewidth=0) for color in (SHADE, UNDRAFTED)]
    named = ("weight in use", "weights whose token the target takes", "not drafted")
    figure.legend([line, *areas], named, loc="outside lower center", ncol=3)
    save(figure, path)
