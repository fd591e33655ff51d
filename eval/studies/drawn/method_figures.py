"""Figures that compare settings of LANTERN, and methods: what relaxing gains, speed, quality, where time goes.

Letters: K and E settings of k and delta.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.lines import Line2D
from torch import Tensor

from ...measured_rows import PLAIN
from ...style import (
    BLUE,
    COLORS,
    GREEN,
    GREY,
    INK,
    MARKERS,
    ORANGE,
    WIDEST,
    errors,
    one_panel,
    panel_grid,
    save,
    stacked,
    styled,
    wrapped,
)  # fmt: skip
from ...summary import Summary


@styled
def acceptance_grid(path: Path, accept: Tensor, ks: Sequence[int], deltas: Sequence[float], *, exact: float) -> None:
    """The first draft's chance under LANTERN, a mean over cells (LANTERN, table 1).

    Args:
        accept: [K,E].
        exact: the same without relaxation (EAGLE-2's).
    """
    figure, panel = one_panel((0.95 * len(deltas) + 1.3, 0.5 * len(ks) + 1.2))
    top = max(float(accept.max()), exact + 1e-6)
    # Colour is what relaxation gains over the exact rule; the palest 5% are left to a gain of nothing.
    panel.pcolormesh(accept.tolist(), cmap="Blues", vmin=exact - 0.05 * (top - exact), vmax=top + 0.3 * (top - exact),
                     edgecolors="white", linewidth=2)  # fmt: skip
    for row, values in enumerate(accept.tolist()):
        for column, value in enumerate(values):
            dark = value - exact > 0.6 * (top - exact)
            panel.text(column + 0.5, row + 0.5, f"{value:.3f}", ha="center", va="center",
                       color="white" if dark else INK)  # fmt: skip
    panel.set_xticks([place + 0.5 for place in range(len(deltas))], [f"{d:g}" for d in deltas])
    panel.set_yticks([place + 0.5 for place in range(len(ks))], [str(k) for k in ks])
    panel.invert_yaxis()
    panel.set(xlabel="delta, the bound on the mass lent", ylabel="k, nearest codes")
    panel.set_title(f"first draft's chance (exact rule: {exact:.3f})")
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    save(figure, path)


@styled
def initialisations(path: Path, methods: Mapping[str, Summary]) -> None:
    """tau, planned depth and speedup of ADT-Tree's ways to start a tree, or of any methods (ADT-Tree, figure 8)."""
    names = list(methods)
    labels = wrapped(names)
    figure, panels = panel_grid(1, 3, (WIDEST, 0.42 * len(names) + 1.35), sharey=True)
    some = list(methods.values())
    columns = (
        ([one.tau for one in some], [one.tau_interval for one in some], "tau (tokens a target pass)"),
        ([one.planned_depth for one in some], None, "planned depth (d)"),
        ([one.ESR for one in some], [one.ESR_spread for one in some], "speedup (SR)"),
    )
    for panel, color, (values, ends, label) in zip(panels[0], COLORS, columns, strict=False):
        error = None if ends is None else errors(values, ends)
        panel.barh(labels, values, height=0.62, color=color, xerr=error, error_kw={"ecolor": INK, "capsize": 2})
        top = values if ends is None else [max(v, high) for v, (_, high) in zip(values, ends, strict=True)]
        for place, (value, end) in enumerate(zip(values, top, strict=True)):
            panel.text(end + 0.02 * max(top), place, f"{value:.2f}", va="center", fontsize=8, color=INK)
        if ends is not None:  # plain decoding has 1 of tau and of SR, and no depth
            panel.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
        panel.set(xlabel=label, xlim=(0, 1.2 * max(*top, 1.0)))
        panel.tick_params(axis="y", length=0)
    panels[0][0].invert_yaxis()
    save(figure, path)


@dataclass(frozen=True)
class TradeOff:
    """One setting of LANTERN, measured."""

    k: int
    limit: float  # the value of its bound
    tau: float
    quality: float


@styled
def trade_off(
    path: Path,
    points: Sequence[TradeOff],
    *,
    quality: str,
    higher_is_better: bool,
    references: Mapping[str, tuple[float, float]] | None = None,
    bound: str = "delta",
) -> None:
    """Quality against tau: a colour and line for each k, a mark for each value of the bound (LANTERN, figure 5).

    Args:
        quality: the metric's name.
        references: name -> (tau, quality) of methods without k and a bound.
        bound: its name; LANTERN++'s is lambda.
    """
    figure, panel = one_panel((6.4, 3.8))
    ks, limits = sorted({p.k for p in points}), sorted({p.limit for p in points})
    assert len(ks) <= len(COLORS) and len(limits) <= len(MARKERS), (ks, limits)
    for color, k in zip(COLORS, ks, strict=False):
        line = sorted((p for p in points if p.k == k), key=lambda p: p.limit)
        panel.plot([p.tau for p in line], [p.quality for p in line], "-", color=color, linewidth=1.2, alpha=0.7)
        for point in line:
            marker = MARKERS[limits.index(point.limit)]
            panel.plot(point.tau, point.quality, marker, color=color, markersize=7, markeredgecolor="white")
    for number, (name, (x, y)) in enumerate((references or {}).items()):
        panel.plot(x, y, "*", color=INK, markersize=11)
        # Above and below in turn: plain and exact decoding lie near one another.
        panel.annotate(name, (x, y), xytext=(0, -16 if number % 2 else 8), textcoords="offset points", ha="center",
                       fontsize=8, color=INK)  # fmt: skip
    entries = [Line2D([], [], color=c, linewidth=2.5, label=f"k = {k}") for c, k in zip(COLORS, ks, strict=False)]
    entries += [Line2D([], [], color=GREY, marker=MARKERS[i], linestyle="", label=f"{bound} = {v:g}")
                for i, v in enumerate(limits)]  # fmt: skip
    panel.legend(handles=entries, loc="center left", bbox_to_anchor=(1.0, 0.5))
    better = "higher" if higher_is_better else "lower"
    panel.set(xlabel="mean accepted length (tau)", ylabel=f"{quality} ({better} is better)")
    panel.margins(0.12)
    panel.grid(alpha=0.25)
    save(figure, path)


@styled
def latency_bars(path: Path, methods: Mapping[str, Summary]) -> None:
    """Where a cycle's time goes, a row for each method under that of plain decoding (LANTERN, table 8)."""
    figure, panel = one_panel((7.0, 0.42 * (len(methods) + 1) + 1.3))
    bars = {PLAIN: (next(iter(methods.values())).T_p_ms, 0.0, 0.0)}
    bars |= {name: (s.target_ms, s.drafter_ms, s.rule_ms) for name, s in methods.items()}
    handles = stacked(panel, bars, (BLUE, ORANGE, GREEN), shown=".1f", least=0.07)
    widest = max(map(sum, bars.values()))
    for row, parts in enumerate(bars.values()):
        panel.text(sum(parts) + 0.01 * widest, row, f"{sum(parts):.1f}", va="center", fontsize=8, color=INK)
    panel.set(xlabel="median times of a cycle (ms)", xlim=(0, 1.1 * widest))
    figure.legend(handles, ("target", "drafter", "acceptance rule"), loc="outside lower center", ncol=3)
    save(figure, path)
