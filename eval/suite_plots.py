"""Pictures of the suite: its tables, and answers side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_ROW, _CELL, _NAME = 0.24, 0.78, 1.5  # inches: height of a row, width of a number and of a name
_BEST = "#2a6fbb"


def draw_tables(path: Path, tables: Sequence[dict[str, Any]]) -> None:
    """The tables of `suite_table.build` below each other: best bold and blue, second best underlined."""
    widths = [2 * _NAME + _CELL * len(table["columns"]) for table in tables]
    heights = [_ROW * (len(table["rows"]) + 4) for table in tables]
    figure, panels = plt.subplots(
        len(tables), 1, figsize=(max(widths), sum(heights)), squeeze=False, height_ratios=heights
    )
    for panel, table, width in zip(panels[:, 0], tables, widths, strict=True):
        panel.set(xlim=(0, max(widths)), ylim=(len(table["rows"]) + 3, -0.5))
        panel.axis("off")
        _draw(panel, table, width)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.01, hspace=0.02)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw(panel: Any, table: dict[str, Any], width: float) -> None:
    panel.text(0, 0, table["title"], weight="bold", fontsize=9, va="center")
    for text, x in (("draft", 0.0), ("method", _NAME)):
        panel.text(x, 2, text, fontsize=8, va="center")
    for number, name in enumerate(table["columns"]):
        panel.text(_x(number), 1.7, name.replace(" (", "\n("), fontsize=7, ha="center", va="center")
    for y in (1.0, 2.5, len(table["rows"]) + 2.5):
        panel.plot([0, width], [y, y], color="black", linewidth=0.8)
    shown = None
    for place, row in enumerate(table["rows"]):
        y = place + 3
        if row["drafter"] != shown:
            panel.text(0, y, row["drafter"], fontsize=8, va="center")
            if shown is not None:
                panel.plot([0, width], [y - 0.5, y - 0.5], color="black", linewidth=0.4)
        shown = row["drafter"]
        panel.text(_NAME, y, row["mode"], fontsize=8, va="center")
        for number, (value, mark) in enumerate(zip(row["values"], row["marks"], strict=True)):
            _number(panel, _x(number), y, value, mark)
    left = len(table["columns"])
    for name, count in reversed(table["groups"].items()):
        left -= count
        if count:
            panel.plot([_x(left) - _CELL / 2] * 2, [1, len(table["rows"]) + 2.5], color="black", linewidth=0.4)
            panel.text(_x(left + (count - 1) / 2), 0.55, name, fontsize=8, ha="center", va="center")


def _number(panel: Any, x: float, y: float, value: float | None, mark: str) -> None:
    if value is None:
        return
    best = mark == "best"
    panel.text(
        x, y, f"{value:.2f}", fontsize=8, ha="center", va="center",
        weight="bold" if best else "normal", color=_BEST if best else "black",
    )  # fmt: skip
    if mark == "second":
        panel.plot([x - 0.15, x + 0.15], [y + 0.36, y + 0.36], color="black", linewidth=0.7)


def _x(number: int) -> float:
    return 2 * _NAME + _CELL * (number + 0.5)
