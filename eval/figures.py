"""The pictures that every report has: acceptance by depth, expected and measured speedup, what was drawn, curves.

All have one style, in colours that stay apart for colour-blind readers (Okabe and Ito) and sizes that suit a README: at
most eight inches at 130 dots. Letters: B pictures, S side in pixels.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from PIL import Image
from torch import Tensor

from .summary import Depth, Summary

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes as Panel
    from matplotlib.figure import Figure
else:  # matplotlib is imported where a figure is drawn
    Panel = object

MOST_PANELS, PER_ROW, MOST_BARS = 6, 3, 24
GAP = 2  # pixels between the pictures of a grid
BLUE, ORANGE, GREEN, VERMILION, PINK, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY, PALE, INK = "#8A8A8A", "#D9D9D9", "#333333"
COLORS = (BLUE, ORANGE, GREEN, VERMILION, PINK, SKY, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "figure.titlesize": 10, "legend.fontsize": 8,
    "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
    "figure.constrained_layout.h_pad": 0.07, "figure.constrained_layout.w_pad": 0.06,
}  # fmt: skip
WIDEST = 8.0  # inches
Drawing = ParamSpec("Drawing")


def styled(draw: Callable[Drawing, None]) -> Callable[Drawing, None]:
    """Draws a figure with `STYLE`: matplotlib's own settings stay as they were.

    matplotlib is imported here and in `panel_grid`: sections of recipes stand beside figures, and a dry run draws none.
    """

    @functools.wraps(draw)
    def drawn(*args: Drawing.args, **kwargs: Drawing.kwargs) -> None:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            draw(*args, **kwargs)

    return drawn


def panel_grid(rows: int, columns: int, size: tuple[float, float], **more: Any) -> tuple[Figure, np.ndarray]:
    """A figure of `size` inches and its panels [rows][columns]; `more` as of matplotlib's `subplots`."""
    from matplotlib.figure import Figure  # without a window, whatever the backend

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def panels_for(count: int, width: float, height: float, **more: Any) -> tuple[Figure, np.ndarray]:
    """A figure of `count` panels of this size, three in a row: those that are left over are hidden."""
    rows, columns = -(-count // PER_ROW), min(PER_ROW, count)
    figure, panels = panel_grid(rows, columns, (width * columns, height * rows), **more)
    for panel in panels.flat[count:]:
        panel.set_visible(False)
    return figure, panels


def save(figure: Figure, path: Path) -> None:
    """Writes the file, its folders too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight", pad_inches=0.08)


def lines(panel: Panel, groups: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """A line for each name, (x, y), with a colour and a mark of its own: as many as there are colours."""
    for color, marker, (name, (xs, ys)) in zip(COLORS, MARKERS, groups.items(), strict=False):
        panel.plot(xs, ys, "-", color=color, marker=marker, label=name, markeredgecolor="white")


@styled
def acceptance_by_depth(path: Path, places: Mapping[str, Mapping[str, Summary]]) -> None:
    """One panel for each place, a line for each method: share of the drafted tokens of a depth that were accepted, and
    at each point the cycles that it is of.

    Args:
        places: what was measured on -> method -> its summary; the first six, and the seven methods of highest tau.
    """
    shown = dict(list(places.items())[:MOST_PANELS])
    figure, panels = panels_for(len(shown), WIDEST / PER_ROW if len(shown) >= PER_ROW else 3.6, 2.8, sharey=True)
    names = _highest({name: s for methods in shown.values() for name, s in methods.items()}, len(COLORS))
    lines: dict[str, Any] = {}
    for panel, (title, methods) in zip(panels.flat, shown.items(), strict=False):
        for name, color in zip(names, COLORS, strict=False):
            if name in methods and (depths := methods[name].accepted_by_depth):
                (lines[name],) = panel.plot([d.depth for d in depths], [d.share for d in depths], "o-", color=color,
                                            markersize=4)  # fmt: skip
        _counts(panel, {names.index(name): s.accepted_by_depth for name, s in methods.items() if name in names})
        panel.set(title=title, xlabel="depth of the drafted token", ylim=(0, 1.02))
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.25)
    for row in panels:
        row[0].set_ylabel("share accepted")
    figure.legend([*lines.values()], [*lines], loc="outside lower center", ncol=4)
    save(figure, path)


def _counts(panel: Panel, lines: Mapping[int, Sequence[Depth]]) -> None:
    """At each depth the cycles that each point is of, in its line's colour and in the order of the points: over the
    highest or under the lowest, where there is more room.

    Args:
        lines: place of the line's colour -> its points.
    """
    for depth in sorted({d.depth for depths in lines.values() for d in depths}):
        points = [(d.share, d.drafted, line) for line, depths in lines.items() for d in depths if d.depth == depth]
        high, low = max(points)[0], min(points)[0]
        is_over = 1 - high > low
        for place, (_, drafted, line) in enumerate(sorted(points, reverse=not is_over)):
            away = 4 + 7 * place
            panel.annotate(f"{drafted:,}", (depth, high if is_over else low), (0, away if is_over else -away),
                           textcoords="offset points", color=COLORS[line], fontsize=6, ha="center",
                           va="bottom" if is_over else "top")  # fmt: skip


def _highest(methods: Mapping[str, Summary], count: int) -> list[str]:
    """The methods of highest tau, in the order of the tables."""
    best = sorted(methods, key=lambda name: -methods[name].tau)[:count]
    return [name for name in methods if name in best]


@styled
def methods(path: Path, places: Mapping[str, Mapping[str, Summary]]) -> None:
    """A line for each method, a colour for each set: tau on the left, measured speedup of decoding on the right."""
    names = list(dict.fromkeys(name for methods in places.values() for name in methods))
    figure, panels = panel_grid(1, 2, (WIDEST, 0.3 * len(names) + 1.2), sharey=True)
    for panel, (title, value) in zip(
        panels[0],
        (("tau (tokens a target pass)", lambda s: s.tau), ("speedup of decoding (DSR)", lambda s: s.DSR)),
        strict=True,
    ):
        for (place, summaries), color in zip(places.items(), COLORS, strict=False):
            points = [(value(summaries[name]), row) for row, name in enumerate(names) if name in summaries]
            panel.plot(*zip(*points, strict=True), "o", color=color, markersize=5, label=place)
        panel.set(xlabel=title)
        panel.grid(axis="both", alpha=0.25)
        panel.axvline(1.0, color=GREY, linewidth=1, linestyle="--")
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].set_ylim(len(names) - 0.5, -0.5)  # the first method at the top, half a row beyond each end
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncol=6)
    save(figure, path)


@styled
def speedups(path: Path, places: Mapping[str, Mapping[str, Summary]]) -> None:
    """Expected against measured speedup of decoding, with its quartiles; the line at 1 is plain decoding."""
    bars = [(f"{place}: {name}", s) for place, methods in places.items() for name, s in methods.items()][:MOST_BARS]
    figure, ((panel,),) = panel_grid(1, 1, (6.4, 0.36 * len(bars) + 1.1))
    for row, (_, s) in enumerate(bars):
        # As far as they reach below and above; an interval need not hold the value that it is of.
        errors = [[max(0.0, s.DSR - s.DSR_spread[0])], [max(0.0, s.DSR_spread[1] - s.DSR)]]
        panel.barh(row - 0.19, s.expected_speedup, 0.36, color=ORANGE, label="expected" if not row else None)
        panel.barh(row + 0.19, s.DSR, 0.36, xerr=errors, color=BLUE,
                   error_kw={"ecolor": INK, "capsize": 2},
                   label="measured (DSR, quartiles)" if not row else None)  # fmt: skip
    panel.axvline(1.0, color=GREY, linewidth=1, linestyle="--")
    panel.set_yticks(range(len(bars)), [textwrap.fill(name, 26) for name, _ in bars])
    panel.margins(y=0.5 / len(bars))
    panel.invert_yaxis()
    panel.tick_params(axis="y", length=0)
    panel.set_xlabel("speedup of decoding over plain decoding")
    figure.legend(loc="outside lower center", ncol=2)
    save(figure, path)


@styled
def draw_curves(path: Path, panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[int, float]]]]]) -> None:
    """Training curves of several runs, one panel for each stage and metric.

    Args:
        panels: title, run -> (step, value); a run has the same colour in all of them.
    """
    names = list(dict.fromkeys(name for _, lines in panels for name in lines))
    figure, axes = panels_for(len(panels), 4.2, 3.0)
    for panel, (title, lines) in zip(axes.flat, panels, strict=False):
        for name, points in lines.items():
            steps, values = zip(*points, strict=True)
            marks: dict[str, object] = {"marker": "o", "markersize": 3} if len(points) < 12 else {}
            number = names.index(name)
            # Wider below: runs that agree are both seen.
            width = 1.2 + 1.6 * (len(names) - 1 - number) / len(names)
            panel.plot(steps, values, color=f"C{number % 10}", label=name, linewidth=width, **marks)
        panel.set(title=title, xlabel="optimizer step")
        panel.grid(alpha=0.25)
    axes[0][0].legend()
    save(figure, path)


def save_grid(path: Path, pictures: Tensor, *, columns: int | None = None, scale: int | None = None) -> None:
    """uint8 [B,3,S,S] as one PNG, row by row.

    Args:
        columns: pictures in a row; None makes the grid about square.
        scale: each pixel becomes so many; None enlarges small pictures to about 96 pixels.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    side = pictures.shape[-1]
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    scale = scale or max(1, 96 // side)
    rows = math.ceil(len(pictures) / columns)
    cell = side * scale + GAP
    sheet = Image.new("RGB", (columns * cell - GAP, rows * cell - GAP), (200, 200, 200))
    for number, picture in enumerate(pictures.permute(0, 2, 3, 1).cpu().numpy()):
        row, column = divmod(number, columns)
        image = Image.fromarray(picture).resize((side * scale, side * scale), Image.Resampling.NEAREST)
        sheet.paste(image, (column * cell, row * cell))
    sheet.save(path)
