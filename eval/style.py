"""The common style of all figures.

Colours stay apart for colour-blind readers (Okabe and Ito). Sizes suit a README: at most eight inches at 130 dots.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes as Panel
    from matplotlib.figure import Figure
else:  # matplotlib is imported where a figure is drawn
    Panel = object

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


def one_panel(size: tuple[float, float]) -> tuple[Figure, Panel]:
    """A figure of `size` inches and its only panel."""
    figure, panels = panel_grid(1, 1, size)
    return figure, panels[0][0]


def panel_grid(
    rows: int,
    columns: int,
    size: tuple[float, float],
    *,
    sharey: bool = False,
    widths: Sequence[float] | None = None,
    heights: Sequence[float] | None = None,
) -> tuple[Figure, np.ndarray]:
    """A figure of `size` inches and its panels [rows][columns]."""
    from matplotlib.figure import Figure  # without a window, whatever the backend

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(
        rows, columns, squeeze=False, sharey=sharey, width_ratios=widths, height_ratios=heights
    )


def save(figure: Figure, path: Path) -> None:
    """Writes the file, its folders too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight", pad_inches=0.08)


def lines(panel: Panel, groups: Mapping[str, tuple[Sequence[float], Sequence[float]]], **more: Any) -> None:
    """A line for each name, (x, y), with a colour and a mark of its own."""
    assert len(groups) <= len(COLORS), f"{len(groups)} lines, and {len(COLORS)} colours"
    for color, marker, (name, (xs, ys)) in zip(COLORS, MARKERS, groups.items(), strict=False):
        panel.plot(xs, ys, "-", color=color, marker=marker, label=name, markeredgecolor="white", **more)


def errors(values: Sequence[float], intervals: Sequence[Sequence[float]]) -> list[list[float]]:
    """Distances below and above, as error bars take them; an interval need not hold the value that it is of."""
    low = [max(0.0, value - ends[0]) for value, ends in zip(values, intervals, strict=True)]
    high = [max(0.0, ends[1] - value) for value, ends in zip(values, intervals, strict=True)]
    return [low, high]


def wrapped(names: Sequence[str]) -> list[str]:
    """Names on lines that leave room for the bars beside them."""
    return [textwrap.fill(name, 26) for name in names]
