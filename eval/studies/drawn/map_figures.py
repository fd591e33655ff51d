"""Figures over the picture: maps of its cells below it, distributions at a few of them. Maps are cividis.

Letters: G cells along a side of the picture, n cells, S side in pixels, V vocabulary.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.colors import BoundaryNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ...style import BLUE, GREEN, GREY, INK, PALE, VERMILION, WIDEST, Panel, panel_grid, save, styled

MAP = "cividis"
MOST_COLUMNS = 5  # pictures side by side
SHOWN_TOKENS = 40  # the most likely ones, of a distribution


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
    figure, panels = panel_grid(1, len(widths), (min(sum(widths), WIDEST), 2.7), widths=widths)
    _picture(panels[0][0], picture)
    marks = (VERMILION, BLUE, GREEN)
    for name, color, cell, panel in zip("abc", marks, cells, panels[0][1:], strict=False):
        row, column = divmod(cell, grid)
        _mark(panels[0][0], row, column, picture.shape[-1] / grid, name, color)
        _distribution(panel, p[cell], None if q is None or cell == 0 else q[cell - 1], color)
        panel.set_title(f"{name}: row {row + 1}, column {column + 1}")
    panels[0][1].set_ylabel("probability")
    entries: list[object] = [Patch(color=GREY, label="target")]
    if q is not None:
        entries.append(Line2D([], [], color=INK, marker=".", linestyle="", label="head, same tokens"))
    panels[0][0].legend(handles=entries, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    save(figure, path)


def _mark(panel: Panel, row: int, column: int, scale: float, name: str, color: str) -> None:
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


def _distribution(panel: Panel, p: Tensor, q: Tensor | None, color: str) -> None:
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
    figure, panels = panel_grid(1, len(maps), (min(2.0 * len(maps), WIDEST), 2.9 if len(maps) < 5 else 2.5))
    for panel, (name, values) in zip(panels[0], maps.items(), strict=True):
        shown = _probabilities(panel, values)
        panel.set_title(f"{name}\nmean {float(values.nanmean()):.3g}")
        bar = figure.colorbar(shown, ax=panel, orientation="horizontal", pad=0.04, aspect=18, ticks=MaxNLocator(4))
        _calm(bar)
    figure.supxlabel("tokens in the set A of the first draft", fontsize=9)
    save(figure, path)


@styled
def picture_maps(
    path: Path,
    pictures: Sequence[Tensor],
    maps: Sequence[Tensor],
    label: str,
    titles: Sequence[str] = (),
    *,
    limits: tuple[float, float] | None = None,
) -> None:
    """Pictures in the upper row, maps of their cells on one scale below (ADT-Tree, figures 2, 4 and 9).

    Args:
        pictures: uint8 [3,S,S] each, up to five; empty shows the maps alone.
        maps: [G,G] of each picture, or means of them.
        label: what the number of a cell is.
        titles: of the columns.
        limits: of the scale; None: the least and the largest number.
    """
    assert 1 <= len(maps) <= MOST_COLUMNS and len(pictures) in (0, len(maps)), (len(pictures), len(maps))
    width, rows = min(1.9, WIDEST / len(maps)), 2 if pictures else 1
    # Wrapped to the width of a picture; a line takes a sixth of an inch.
    texts = [textwrap.fill(title, int(14 * width), max_lines=3, placeholder=" …") for title in titles]
    lines = max((text.count("\n") + 1 for text in texts), default=0)
    figure, panels = panel_grid(rows, len(maps), (max(width * len(maps), 2.4), rows * width + 0.62 + lines / 6.5))
    low, high = limits or (min(float(m[~m.isnan()].min()) for m in maps), max(float(m[~m.isnan()].max()) for m in maps))
    whole = limits is None and all(bool((m.isnan() | (m == m.round())).all()) for m in maps) and high - low < 12
    for column, values in enumerate(maps):
        if pictures:
            _picture(panels[0][column], pictures[column])
        shown = _probabilities(panels[-1][column], values, (low, high), steps=whole)
        panels[0][column].set_title(texts[column] if texts else "")
    shrink = min(1.0, 1.6 / len(maps)) if len(maps) > 1 else 1.0
    bar = figure.colorbar(
        shown, ax=panels.ravel().tolist(), label=label, orientation="horizontal", shrink=shrink, aspect=26, pad=0.02
    )
    if whole:
        bar.set_ticks(list(range(int(low), int(high) + 1)))
    _calm(bar)
    save(figure, path)


def _picture(panel: Panel, picture: Tensor) -> None:
    panel.imshow(picture.permute(1, 2, 0).cpu().numpy(), interpolation="nearest")
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set(visible=True, color=PALE)


def _probabilities(
    panel: Panel, values: Tensor, limits: tuple[float, float] | None = None, *, steps: bool = False
) -> Any:
    """The map; `steps` gives each whole number a colour of its own, and cells without a number stay grey."""
    low, high = limits or (float(values[~values.isnan()].min()), float(values[~values.isnan()].max()))
    colors = matplotlib.colormaps[MAP].resampled(int(high - low) + 1) if steps else matplotlib.colormaps[MAP]
    colors = colors.with_extremes(bad=PALE)
    if steps:
        bounds = [low - 0.5 + step for step in range(int(high - low) + 2)]
        shown = panel.imshow(values.float().numpy(), cmap=colors, norm=BoundaryNorm(bounds, colors.N))
    else:
        shown = panel.imshow(values.float().numpy(), cmap=colors, vmin=low, vmax=high if high > low else low + 1)
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_visible(False)
    return shown


def _calm(bar: Any) -> None:
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
