"""The figures of the visual track: one function writes one file, from tensors and numbers of `analysis`.

They are those of LANTERN and ADT-Tree, for whatever was measured. Colours stay apart for colour-blind readers
(Okabe and Ito), maps are cividis. Sizes suit a README: at most eight inches at 130 dots.
Letters: G cells along a side of the picture, n cells, S side in pixels, K and E settings of k and delta, V vocabulary.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import BoundaryNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

BLUE, ORANGE, GREEN, VERMILION, PINK, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY, PALE, INK = "#8A8A8A", "#D9D9D9", "#333333"
COLORS = (BLUE, ORANGE, GREEN, VERMILION, PINK, SKY, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P")
MAP = "cividis"
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "figure.titlesize": 10, "legend.fontsize": 8,
    "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
    "figure.constrained_layout.h_pad": 0.07, "figure.constrained_layout.w_pad": 0.06,
}  # fmt: skip
WIDEST = 8.0  # inches
MOST_COLUMNS = 5  # pictures side by side
SHOWN_TOKENS = 40  # the most likely ones, of a distribution
RANK_BINS = ((1, 1), (2, 2), (3, 3), (4, 5), (6, 10), (11, 20), (21, 50), (51, 100), (101, 300), (301, 1000))
Drawing = ParamSpec("Drawing")


def styled(draw: Callable[Drawing, None]) -> Callable[Drawing, None]:
    """With `STYLE` while a figure is drawn: matplotlib's own settings stay as they were."""

    @functools.wraps(draw)
    def drawn(*args: Drawing.args, **kwargs: Drawing.kwargs) -> None:
        with plt.rc_context(STYLE):
            draw(*args, **kwargs)

    return drawn


# ---- over the picture


@styled
def depth_map(path: Path, pictures: Sequence[Tensor], maps: Sequence[Tensor], titles: Sequence[str] = ()) -> None:
    """Pictures over the depth in its draft tree at which each token stood (ADT-Tree, figure 2).

    Args:
        pictures: uint8 [3,S,S] each, up to five; empty shows the maps alone.
        maps: `analysis.depth_map` of each, [G,G], or means of them.
        titles: of the columns.
    """
    _maps(path, pictures, maps, titles, "depth in the draft tree (0: not drafted)")


@styled
def length_map(path: Path, pictures: Sequence[Tensor], maps: Sequence[Tensor], titles: Sequence[str] = ()) -> None:
    """Pictures over the acceptance length of the cycle that emitted each token; arguments as of `depth_map`."""
    _maps(path, pictures, maps, titles, "acceptance length of the cycle (tokens)")


@styled
def top1_map(path: Path, pictures: Sequence[Tensor], maps: Sequence[Tensor], titles: Sequence[str] = ()) -> None:
    """Pictures over the probability of the target's most likely token (ADT-Tree, figures 4 and 9)."""
    _maps(path, pictures, maps, titles, "probability of the target's most likely token", limits=(0.0, 1.0))


@styled
def distributions_at(
    path: Path, picture: Tensor, p: Tensor, q: Tensor | None, cells: Sequence[int], *, grid: int
) -> None:
    """The target's most likely tokens in a few cells, and what the head gives them (ADT-Tree, figure 5).

    Args:
        p: [n,V] of the picture's cells.
        q: [n-1,V] of the cells from the second on; None leaves it out.
        cells: numbers in raster order, up to three (a, b, c).
    """
    widths = [2.0, *[2.6] * len(cells)]
    figure, panels = _panels(1, len(widths), (min(sum(widths), WIDEST), 2.7), widths=widths)
    _picture(panels[0][0], picture)
    marks = (VERMILION, BLUE, GREEN)
    for name, color, cell, panel in zip("abc", marks, cells, panels[0][1:], strict=False):
        row, column = divmod(cell, grid)
        _mark(panels[0][0], row, column, picture.shape[-1] / grid, name, color)
        _distribution(panel, p[cell], None if q is None or cell == 0 else q[cell - 1], color)
        panel.set_title(f"{name}: row {row + 1}, column {column + 1}")
    panels[0][1].set_ylabel("probability")
    entries: list[Any] = [Patch(color=GREY, label="target")]
    if q is not None:
        entries.append(Line2D([], [], color=INK, marker=".", linestyle="", label="head, same tokens"))
    panels[0][0].legend(handles=entries, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    _save(figure, path)


def _mark(panel: Any, row: int, column: int, scale: float, name: str, color: str) -> None:
    """A frame around a cell, with a white rim that shows it on any picture, and its letter beside it."""
    corner = (column * scale - 0.5, row * scale - 0.5)
    for width, rim in ((3.6, "white"), (1.8, color)):
        panel.add_patch(Rectangle(corner, scale, scale, fill=False, edgecolor=rim, linewidth=width))
    left = column * scale > scale * 2
    panel.annotate(
        name, (corner[0] + (0 if left else scale), corner[1] + scale / 2), xytext=(-4 if left else 4, 0),
        textcoords="offset points", ha="right" if left else "left", va="center", color=color, fontsize=10,
        fontweight="bold", path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )  # fmt: skip


def _distribution(panel: Any, p: Tensor, q: Tensor | None, color: str) -> None:
    shown = max(min(SHOWN_TOKENS, int((p > 0).sum())), 5)
    mass, order = p.sort(descending=True)
    places = range(1, shown + 1)
    panel.bar(places, mass[:shown].tolist(), width=0.85, color=color)
    if q is not None:
        panel.plot(places, q[order[:shown]].tolist(), ".", color=INK, markersize=4)
    perplexity = float(torch.special.entr(p).sum().exp())
    facts = [f"top-1 {100 * float(mass[0]):.3g}%", f"top-10 {100 * float(mass[:10].sum()):.3g}%",
             f"perplexity {perplexity:.1f}" if perplexity < 100 else f"perplexity {perplexity:.0f}"]  # fmt: skip
    panel.text(0.97, 0.97, "\n".join(facts), transform=panel.transAxes, ha="right", va="top", color=INK, fontsize=8)
    panel.set(xlabel=f"{shown} most likely of {len(p)} tokens", xlim=(0, shown + 1))
    panel.ticklabel_format(axis="y", scilimits=(-3, 4))


@styled
def set_size_grid(path: Path, maps: Mapping[str, Tensor]) -> None:
    """Mean size of LANTERN's sets over the cells of pictures, a panel for each setting (LANTERN, figure 7).

    Args:
        maps: name of a setting -> [G,G]; each has its own scale, sizes differ too much for one.
    """
    assert 1 <= len(maps) <= MOST_COLUMNS, len(maps)
    figure, panels = _panels(1, len(maps), (min(2.0 * len(maps), WIDEST), 2.9 if len(maps) < 5 else 2.5))
    for panel, (name, values) in zip(panels[0], maps.items(), strict=True):
        shown = _heat(panel, values)
        panel.set_title(f"{name}\nmean {float(values.nanmean()):.3g}")
        bar = figure.colorbar(shown, ax=panel, orientation="horizontal", pad=0.04, aspect=18, ticks=MaxNLocator(4))
        _calm(bar)
    figure.supxlabel("tokens in the set A of the first draft", fontsize=9)
    _save(figure, path)


# ---- counts and shares


@styled
def accepted_histogram(path: Path, shares: Mapping[str, Sequence[float]]) -> None:
    """Share of cycles by acceptance length, bonus token included (ADT-Tree, figure 3a).

    Args:
        shares: name -> shares of lengths 1, 2, ...: methods at one temperature, or temperatures of one method.
    """
    longest = max(len(values) for values in shares.values())
    groups = {str(length): {n: v[length - 1] if length <= len(v) else 0.0 for n, v in shares.items()}
              for length in range(1, longest + 1)}  # fmt: skip
    means = {name: sum((i + 1) * share for i, share in enumerate(values)) for name, values in shares.items()}
    figure, panel = _one((min(max(4.6, 0.62 * longest + 1.6), WIDEST) if len(shares) <= 3 else WIDEST, 3.1))
    labels = _wrapped([f"{name} (mean\u00a0{mean:.2f})" for name, mean in means.items()])
    _grouped(panel, groups, labels=dict(zip(means, labels, strict=True)))
    panel.set(xlabel="acceptance length of a cycle (tokens, with the bonus)", ylabel="share of cycles")
    _save(figure, path)


@styled
def rank_histogram(path: Path, ranks: Mapping[str, Tensor], *, width: int | None = None) -> None:
    """Where the head ranks the right token (ADT-Tree, figure 3b).

    Args:
        ranks: name -> ranks from 1, any shape.
        width: of the trees: a right token beyond it is not drafted at their root.
    """
    largest = max(int(found.max()) for found in ranks.values())
    bins = [edges for edges in RANK_BINS if edges[0] <= largest]
    last = RANK_BINS[-1][1]
    bins += [(last + 1, largest)] if largest > last else []
    groups: dict[str, dict[str, float]] = {}
    for low, high in bins:
        label = str(low) if low == high else f"{low}–{high}" if high <= last else f">{last}"
        groups[label] = {name: float(((r >= low) & (r <= high)).float().mean()) for name, r in ranks.items()}
    figure, panel = _one((min(max(4.6, 0.62 * len(bins) + 1.2), WIDEST), 3.1))
    _grouped(panel, groups)
    inside = sum(high <= width for _, high in bins) if width else len(bins)
    if width and inside < len(bins):
        # A width between the ends of a bin cuts through it.
        place = inside - (0.5 if bins[inside][0] > width else 0.0)
        panel.axvline(place, color=GREY, linestyle="--", linewidth=1)
        panel.text(place + 0.08, 0.98, f"beyond a tree\nof width {width}", transform=panel.get_xaxis_transform(),
                   va="top", color=GREY, fontsize=8)  # fmt: skip
    panel.set(xlabel="rank of the right token in the head's distribution", ylabel="share of cells")
    _save(figure, path)


@styled
def accuracy_bars(path: Path, groups: Mapping[str, Mapping[str, float]], *, target: str = "target") -> None:
    """How often the head ranks the target's most likely token first, or among three (LANTERN 2b, ADT-Tree 1).

    Args:
        groups: "training pictures", "held-out pictures" -> {"top-1", "top-3"} -> share.
        target: its name.
    """
    _shares(path, groups, f"head's accuracy for the {target}'s\nmost likely token")


@styled
def probability_bars(path: Path, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Probability of the target's most likely token and of its ten most likely (LANTERN, figure 2c).

    Args:
        groups: temperature, model or text -> {"top-1", "top-10"} -> mean probability.
    """
    _shares(path, groups, "mean probability under the target")


def _shares(path: Path, groups: Mapping[str, Mapping[str, float]], label: str) -> None:
    figure, panel = _one((max(3.6, 1.35 * len(groups) + 1.4), 3.1))
    _grouped(panel, groups, written=True)
    panel.set(ylabel=label, ylim=(0, 1.1), yticks=[0, 0.25, 0.5, 0.75, 1])
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=3)
    _save(figure, path)


# ---- settings and methods


@styled
def acceptance_grid(
    path: Path, accept: Tensor, ks: Sequence[int], deltas: Sequence[float], *, exact: float, what: str = ""
) -> None:
    """Mean acceptance probability of a cycle's first draft under LANTERN (LANTERN, table 1).

    Args:
        accept: [K,E].
        exact: the same without relaxation (EAGLE-2's).
        what: measured on which pictures.
    """
    figure, panel = _one((0.95 * len(deltas) + 1.3, 0.5 * len(ks) + 1.2))
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
    panel.set_title(f"first draft accepted (exact rule: {exact:.3f})" + (f"\n{what}" if what else ""))
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    _save(figure, path)


@styled
def initialisations(path: Path, methods: Mapping[str, Mapping[str, Any]], *, title: str = "") -> None:
    """tau, mean depth and speedup side by side (ADT-Tree, figure 8).

    Args:
        methods: `analysis.compare` of ADT-Tree's ways to start a tree, or of any methods.
    """
    names = list(methods)
    labels = _wrapped(names)
    figure, panels = _panels(1, 3, (WIDEST, 0.42 * len(names) + 1.35), sharey=True)
    columns = (("tau", "tau_interval", "acceptance length (tau)"), ("mean_levels", None, "mean depth (levels)"),
               ("SR", "SR_spread", "speedup (SR)"))  # fmt: skip
    for panel, color, (key, spread, label) in zip(panels[0], COLORS, columns, strict=False):
        values = [float(methods[name][key]) for name in names]
        error = None if spread is None else _errors(values, [methods[name][spread] for name in names])
        panel.barh(labels, values, height=0.62, color=color, xerr=error, error_kw={"ecolor": INK, "capsize": 2})
        top = [max(v, methods[n][spread][1]) if spread else v for v, n in zip(values, names, strict=True)]
        for place, (value, end) in enumerate(zip(values, top, strict=True)):
            panel.text(end + 0.02 * max(top), place, f"{value:.2f}", va="center", fontsize=8, color=INK)
        if key != "mean_levels":
            panel.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
        panel.set(xlabel=label, xlim=(0, 1.2 * max(*top, 1.0)))
        panel.tick_params(axis="y", length=0)
    panels[0][0].invert_yaxis()
    if title:
        figure.suptitle(title)
    _save(figure, path)


@dataclass(frozen=True)
class TradeOff:
    """One setting of LANTERN, measured."""

    k: int
    delta: float
    speed: float  # tau, or a speedup
    quality: float


@styled
def trade_off(
    path: Path,
    points: Sequence[TradeOff],
    *,
    speed: str,
    quality: str,
    higher_is_better: bool,
    references: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """Quality against speed: a colour and line for each k, a mark for each delta (LANTERN, figure 5).

    Args:
        speed, quality: what the axes show.
        references: name -> (speed, quality) of methods without k and delta.
    """
    figure, panel = _one((6.4, 3.8))
    ks, deltas = sorted({p.k for p in points}), sorted({p.delta for p in points})
    assert len(ks) <= len(COLORS) and len(deltas) <= len(MARKERS), (ks, deltas)
    for color, k in zip(COLORS, ks, strict=False):
        line = sorted((p for p in points if p.k == k), key=lambda p: p.delta)
        panel.plot([p.speed for p in line], [p.quality for p in line], "-", color=color, linewidth=1.2, alpha=0.7)
        for point in line:
            marker = MARKERS[deltas.index(point.delta)]
            panel.plot(point.speed, point.quality, marker, color=color, markersize=7, markeredgecolor="white")
    for number, (name, (x, y)) in enumerate((references or {}).items()):
        panel.plot(x, y, "*", color=INK, markersize=11)
        # Above and below in turn: plain and exact decoding lie near one another.
        panel.annotate(name, (x, y), xytext=(0, -16 if number % 2 else 8), textcoords="offset points", ha="center",
                       fontsize=8, color=INK)  # fmt: skip
    entries = [Line2D([], [], color=c, linewidth=2.5, label=f"k = {k}") for c, k in zip(COLORS, ks, strict=False)]
    entries += [Line2D([], [], color=GREY, marker=MARKERS[i], linestyle="", label=f"delta = {d:g}")
                for i, d in enumerate(deltas)]  # fmt: skip
    panel.legend(handles=entries, loc="center left", bbox_to_anchor=(1.0, 0.5))
    better = "higher" if higher_is_better else "lower"
    panel.set(xlabel=speed, ylabel=f"{quality} ({better} is better)")
    panel.margins(0.12)
    panel.grid(alpha=0.25)
    _save(figure, path)


@styled
def latency_bars(path: Path, methods: Mapping[str, Mapping[str, Any]], *, title: str = "") -> None:
    """Where a cycle's time goes, a row for each method under that of plain decoding (LANTERN, table 8).

    Args:
        methods: name -> medians `target_ms`, `drafter_ms`, `rule_ms` and `plain_ms` of a report's table.
    """
    names = ["plain decoding", *methods]
    figure, panel = _one((7.0, 0.42 * len(names) + 1.3))
    plain = {"target_ms": next(iter(methods.values()))["plain_ms"], "drafter_ms": 0.0, "rule_ms": 0.0}
    tables = [plain, *methods.values()]
    widest = max(sum(float(table[key]) for _, key, _, _ in _PARTS) for table in tables)
    for place, table in enumerate(tables):
        end = 0.0
        for color, key, _, ink in _PARTS:
            value = float(table[key])
            panel.barh(place, value, left=end, height=0.62, color=color)
            if value > 0.07 * widest:
                panel.text(end + value / 2, place, f"{value:.1f}", ha="center", va="center", fontsize=8, color=ink)
            end += value
        panel.text(end + 0.01 * widest, place, f"{end:.1f}", va="center", fontsize=8, color=INK)
    panel.set_yticks(range(len(names)), _wrapped(names))
    panel.invert_yaxis()
    panel.set(xlabel="median times of a cycle (ms)", xlim=(0, 1.1 * widest), title=title)
    panel.tick_params(axis="y", length=0)
    entries = [Patch(color=color, label=label) for color, _, label, _ in _PARTS]
    figure.legend(handles=entries, loc="outside lower center", ncol=3)
    _save(figure, path)


# Colour, key in a report's table, name, and colour of the number on it.
_PARTS = ((BLUE, "target_ms", "target", "white"), (ORANGE, "drafter_ms", "drafter", "black"),
          (GREEN, "rule_ms", "acceptance rule", "white"))  # fmt: skip


# ---- pieces


def _maps(
    path: Path,
    pictures: Sequence[Tensor],
    maps: Sequence[Tensor],
    titles: Sequence[str],
    label: str,
    *,
    limits: tuple[float, float] | None = None,
) -> None:
    """Pictures in the upper row, their maps on one scale below."""
    assert 1 <= len(maps) <= MOST_COLUMNS and len(pictures) in (0, len(maps)), (len(pictures), len(maps))
    width, rows = min(1.9, WIDEST / len(maps)), 2 if pictures else 1
    # Wrapped to the width of a picture; a line takes a sixth of an inch.
    texts = [textwrap.fill(title, int(14 * width), max_lines=3, placeholder=" …") for title in titles]
    lines = max((text.count("\n") + 1 for text in texts), default=0)
    figure, panels = _panels(rows, len(maps), (max(width * len(maps), 2.4), rows * width + 0.62 + lines / 6.5))
    low, high = limits or (min(float(m[~m.isnan()].min()) for m in maps), max(float(m[~m.isnan()].max()) for m in maps))
    whole = limits is None and all(bool((m.isnan() | (m == m.round())).all()) for m in maps) and high - low < 12
    for column, values in enumerate(maps):
        if pictures:
            _picture(panels[0][column], pictures[column])
        shown = _heat(panels[-1][column], values, (low, high), steps=whole)
        panels[0][column].set_title(texts[column] if texts else "")
    shrink = min(1.0, 1.6 / len(maps)) if len(maps) > 1 else 1.0
    bar = figure.colorbar(
        shown, ax=panels.ravel().tolist(), label=label, orientation="horizontal", shrink=shrink, aspect=26, pad=0.02
    )
    if whole:
        bar.set_ticks(list(range(int(low), int(high) + 1)))
    _calm(bar)
    _save(figure, path)


def _picture(panel: Any, picture: Tensor) -> None:
    panel.imshow(picture.permute(1, 2, 0).cpu().numpy(), interpolation="nearest")
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set(visible=True, color=PALE)


def _heat(panel: Any, values: Tensor, limits: tuple[float, float] | None = None, *, steps: bool = False) -> Any:
    """The map; `steps` gives each whole number a colour of its own, and cells without a number stay grey."""
    low, high = limits or (float(values[~values.isnan()].min()), float(values[~values.isnan()].max()))
    colors = plt.get_cmap(MAP, int(high - low) + 1) if steps else plt.get_cmap(MAP)
    colors = colors.with_extremes(bad=PALE)
    if steps:
        bounds = [low - 0.5 + step for step in range(int(high - low) + 2)]
        shown = panel.imshow(values.float().numpy(), cmap=colors, norm=BoundaryNorm(bounds, colors.N))
    else:
        shown = panel.imshow(values.float().numpy(), cmap=colors, vmin=low, vmax=high if high > low else low + 1)
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_visible(False)
    return shown


def _grouped(
    panel: Any,
    groups: Mapping[str, Mapping[str, float]],
    *,
    labels: Mapping[str, str] | None = None,
    written: bool = False,
) -> None:
    """Groups of bars along x, a colour for each name; `written` puts the share above its bar."""
    names = list(next(iter(groups.values())))
    assert len(names) <= len(COLORS), names
    width = 0.8 / len(names)
    for number, (color, name) in enumerate(zip(COLORS, names, strict=False)):
        places = [place - 0.4 + width * (number + 0.5) for place in range(len(groups))]
        values = [group[name] for group in groups.values()]
        panel.bar(places, values, 0.92 * width, color=color, label=(labels or {}).get(name, name))
        for place, value in zip(places, values, strict=True):
            if written:
                panel.text(place, value + 0.015, f"{value:.1%}", ha="center", va="bottom", fontsize=8, color=INK)
    panel.set_xticks(range(len(groups)), list(groups))
    panel.tick_params(axis="x", length=0)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if len(names) > 3:
        panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    elif len(names) > 1 or labels:
        panel.legend()


def _wrapped(names: Sequence[str]) -> list[str]:
    """Names on lines that leave room for the bars beside them."""
    return [textwrap.fill(name, 26) for name in names]


def _errors(values: Sequence[float], spreads: Sequence[Sequence[float]]) -> list[list[float]]:
    """Distances below and above; a spread need not hold the value that it is of."""
    low = [max(0.0, v - s[0]) for v, s in zip(values, spreads, strict=True)]
    high = [max(0.0, s[1] - v) for v, s in zip(values, spreads, strict=True)]
    return [low, high]


def _one(size: tuple[float, float]) -> tuple[Any, Any]:
    figure, panels = _panels(1, 1, size)
    return figure, panels[0][0]


def _panels(
    rows: int, columns: int, size: tuple[float, float], *, sharey: bool = False, widths: Sequence[float] | None = None
) -> tuple[Any, Any]:
    return plt.subplots(
        rows, columns, figsize=size, squeeze=False, sharey=sharey, layout="constrained", width_ratios=widths
    )


def _calm(bar: Any) -> None:
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight", pad_inches=0.08)
    plt.close(figure)
