"""The pictures that every report has: acceptance by depth, expected and measured speedup, what was drawn, curves.

All have one style, in colours that stay apart for colour-blind readers (Okabe and Ito) and sizes that suit a README: at
most eight inches at 130 dots. Letters: B pictures, S side in pixels.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from torch import Tensor

from .summary import Summary

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

MOST_PANELS, PER_ROW, MOST_BARS = 6, 3, 24
GAP = 2  # pixels between the pictures of a grid
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8A8A8A")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "figure.titlesize": 10, "legend.fontsize": 8,
    "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.25, "figure.constrained_layout.h_pad": 0.07, "figure.constrained_layout.w_pad": 0.06,
    "savefig.dpi": 130, "savefig.bbox": "tight", "savefig.pad_inches": 0.08,
}  # fmt: skip
PLAIN_LINE = {"color": COLORS[-1], "linewidth": 1, "linestyle": "--"}  # where plain decoding stands
WIDEST = 8.0  # inches


@contextmanager
def drawing(
    path: Path, count: int, width: float, height: float, *, per_row: int = PER_ROW, **more: Any
) -> Iterator[tuple[Figure, np.ndarray]]:
    """A figure and its panels [rows][per_row], drawn with `STYLE` and written to `path` at the end.

    matplotlib's own settings stay as they were. It is imported here: sections of recipes stand beside figures, and a
    dry run draws none.

    Args:
        count: of panels; those that are left over in the last row are hidden.
        width, height: of a panel, in inches.
        more: as of matplotlib's `subplots`.
    """
    import matplotlib
    from matplotlib.figure import Figure  # without a window, whatever the backend

    rows, columns = -(-count // per_row), min(per_row, count)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, **more)
        for panel in panels.flat[count:]:
            panel.set_visible(False)
        yield figure, panels
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def lines_legend(figure: Figure, panels: np.ndarray) -> None:
    """One legend of the lines of all panels, below them."""
    pairs = [pair for panel in panels.flat for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in pairs}
    figure.legend([*handles.values()], [*handles], loc="outside lower center", ncol=4)


def acceptance_by_depth(path: Path, places: Mapping[str, Mapping[str, Summary]]) -> None:
    """One panel for each place, a line for each method: share of the drafted tokens of a depth that were accepted, and
    above the panel the cycles that each point is of, in the line's colour.

    Args:
        places: what was measured on -> method -> its summary; the first six, and the seven methods of highest tau.
    """
    shown = dict(list(places.items())[:MOST_PANELS])
    summaries = {name: summary for methods in shown.values() for name, summary in methods.items()}
    highest = sorted(summaries, key=lambda name: -summaries[name].tau)[: len(COLORS)]
    colors = dict(zip((name for name in summaries if name in highest), COLORS, strict=False))
    width = WIDEST / PER_ROW if len(shown) >= PER_ROW else 3.6
    with drawing(path, len(shown), width, 2.6 + 0.1 * len(colors), sharey=True) as (figure, panels):
        for panel, (title, methods) in zip(panels.flat, shown.items(), strict=False):
            lines = [name for name in colors if name in methods and methods[name].accepted_by_depth]
            for row, name in enumerate(lines):
                depths, color = methods[name].accepted_by_depth, colors[name]
                panel.plot([d.depth for d in depths], [d.share for d in depths], "o-", color=color, markersize=4,
                           label=name)  # fmt: skip
                for d in depths:
                    panel.annotate(f"{d.drafted:,}", (d.depth, 1.02), (0, 3 + 7 * row), textcoords="offset points",
                                   color=color, fontsize=6, ha="center", annotation_clip=False)  # fmt: skip
            panel.set_title(title, pad=6 + 7 * len(lines))
            panel.set(xlabel="depth of the drafted token", ylim=(0, 1.02))
            panel.xaxis.get_major_locator().set_params(integer=True)
        for row in panels:
            row[0].set_ylabel("share accepted")
        lines_legend(figure, panels)


def methods(path: Path, places: Mapping[str, Mapping[str, Summary]]) -> None:
    """A line for each method, a colour for each set: tau on the left, measured speedup of decoding on the right."""
    names = list(dict.fromkeys(name for methods in places.values() for name in methods))
    numbers = {"tau (tokens a target pass)": "tau", "speedup of decoding (DSR)": "DSR"}
    with drawing(path, 2, WIDEST / 2, 0.3 * len(names) + 1.2, sharey=True) as (figure, panels):
        for panel, (title, number) in zip(panels[0], numbers.items(), strict=True):
            for (place, summaries), color in zip(places.items(), COLORS, strict=False):
                points = [
                    (getattr(summaries[name], number), row) for row, name in enumerate(names) if name in summaries
                ]
                panel.plot(*zip(*points, strict=True), "o", color=color, markersize=5, label=place)
            panel.set(xlabel=title)
            panel.axvline(1.0, **PLAIN_LINE)
        panels[0][0].set_yticks(range(len(names)), names)
        panels[0][0].set_ylim(len(names) - 0.5, -0.5)  # the first method at the top, half a row beyond each end
        lines_legend(figure, panels)


def speedups(path: Path, places: Mapping[str, Mapping[str, Summary]]) -> None:
    """Expected against measured speedup of decoding, with its quartiles; the line at 1 is plain decoding."""
    bars = {f"{place}: {name}": s for place, methods in places.items() for name, s in methods.items()}
    names, summaries = [*bars], [*bars.values()]
    measured = [s.DSR for s in summaries]
    # As far as they reach below and above; an interval need not hold the value that it is of.
    errors = [[max(0.0, s.DSR - s.DSR_spread[0]) for s in summaries],
              [max(0.0, s.DSR_spread[1] - s.DSR) for s in summaries]]  # fmt: skip
    with drawing(path, 1, 6.4, 0.36 * len(names) + 1.1) as (figure, ((panel,),)):
        expected, rows = [s.expected_speedup for s in summaries], range(len(names))
        panel.barh([row - 0.19 for row in rows], expected, 0.36, color=COLORS[1], label="expected")
        panel.barh([row + 0.19 for row in rows], measured, 0.36, xerr=errors, color=COLORS[0],
                   error_kw={"capsize": 2}, label="measured (DSR, quartiles)")  # fmt: skip
        panel.axvline(1.0, **PLAIN_LINE)
        panel.set_yticks(rows, [textwrap.fill(name, 26) for name in names])
        panel.margins(y=0.5 / len(names))
        panel.invert_yaxis()
        panel.grid(visible=False)
        panel.set_xlabel("speedup of decoding over plain decoding")
        figure.legend(loc="outside lower center", ncol=2)


def draw_curves(
    path: Path,
    panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[int, float]]]]],
    places: Sequence[Sequence[str]] = (),
) -> None:
    """Training curves of several runs, one panel for each stage and metric.

    Args:
        panels: title, run -> (step, value); a run has the same colour in all of them.
        places: for each panel the names of steps 0, 1, ..., where they are none of an optimizer.
    """
    names = list(dict.fromkeys(name for _, lines in panels for name in lines))
    with drawing(path, len(panels), 4.2, 3.0) as (figure, axes):
        for panel, (title, lines) in zip(axes.flat, panels, strict=False):
            for name, points in lines.items():
                number = names.index(name)
                width = 1.2 + 1.6 * (len(names) - 1 - number) / len(names)  # wider below: runs that agree are both seen
                panel.plot(*zip(*points, strict=True), marker="o" if len(points) < 12 else "", markersize=3,
                           color=f"C{number % 10}", linewidth=width, label=name)  # fmt: skip
            panel.set(title=title, xlabel="" if places else "optimizer step")
        for panel, of_panel in zip(axes.flat, places, strict=False):
            panel.set_xticks(range(len(of_panel)), of_panel)
        lines_legend(figure, axes)


def save_grid(path: Path, pictures: Tensor, *, columns: int | None = None) -> None:
    """uint8 [B,3,S,S] as one PNG, row by row (about square by default); small ones are enlarged to about 96 pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    side = pictures.shape[-1]
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    scale = max(1, 96 // side)  # each pixel becomes so many
    rows = math.ceil(len(pictures) / columns)
    cell = side * scale + GAP
    sheet = Image.new("RGB", (columns * cell - GAP, rows * cell - GAP), (200, 200, 200))
    for number, picture in enumerate(pictures.permute(0, 2, 3, 1).cpu().numpy()):
        row, column = divmod(number, columns)
        image = Image.fromarray(picture).resize((side * scale, side * scale), Image.Resampling.NEAREST)
        sheet.paste(image, (column * cell, row * cell))
    sheet.save(path)
