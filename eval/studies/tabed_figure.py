"""The suite's tables as a picture, for slides and READMEs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..style import BLUE, panel_grid, save, styled
from ..tables import Column, Mark, Table, Value

_ROW, _CELL, _NAME = 0.24, 0.78, 1.5  # inches: height of a row, width of a number and of a name


@styled
def draw_tables(path: Path, tables: Sequence[Table]) -> None:
    """Tables below each other: best bold and blue, second best underlined."""
    widths = [2 * _NAME + _CELL * (len(table.columns) - 2) for table in tables]
    heights = [_ROW * (len(table.rows) + 4) for table in tables]
    figure, panels = panel_grid(len(tables), 1, (max(widths), sum(heights)), heights=heights)
    for panel, table, width in zip(panels[:, 0], tables, widths, strict=True):
        panel.set(xlim=(0, max(widths)), ylim=(len(table.rows) + 3, -0.5))
        panel.axis("off")
        _draw(panel, table, width)
    save(figure, path)


def _draw(panel: Any, table: Table, width: float) -> None:
    numbers = table.columns[2:]
    panel.text(0, 0, table.title, weight="bold", fontsize=9, va="center")
    for number, column in enumerate(table.columns[:2]):
        panel.text(number * _NAME, 2, column.name, fontsize=8, va="center")
    for number, column in enumerate(numbers):
        panel.text(_x(number), 1.7, column.name.replace(" (", "\n("), fontsize=7, ha="center", va="center")
    for y in (1.0, 2.5, len(table.rows) + 2.5):
        panel.plot([0, width], [y, y], color="black", linewidth=0.8)
    shown: Value = None
    for place, (row, marks) in enumerate(zip(table.rows, table.marks(), strict=True)):
        y = place + 3
        if row[0] != shown:
            panel.text(0, y, row[0], fontsize=8, va="center")
            if shown is not None:
                panel.plot([0, width], [y - 0.5, y - 0.5], color="black", linewidth=0.4)
        shown = row[0]
        panel.text(_NAME, y, row[1], fontsize=8, va="center")
        for number, (value, column, mark) in enumerate(zip(row[2:], numbers, marks[2:], strict=True)):
            _number(panel, _x(number), y, value, column, mark)
    for name in dict.fromkeys(column.group for column in numbers if column.group):
        places = [number for number, column in enumerate(numbers) if column.group == name]
        panel.plot([_x(places[0]) - _CELL / 2] * 2, [1, len(table.rows) + 2.5], color="black", linewidth=0.4)
        panel.text(_x(sum(places) / len(places)), 0.55, name, fontsize=8, ha="center", va="center")


def _number(panel: Any, x: float, y: float, value: Value, column: Column, mark: Mark) -> None:
    if value is None:
        return
    best = mark == "best"
    panel.text(x, y, column.shown(value), fontsize=8, ha="center", va="center",
               weight="bold" if best else "normal", color=BLUE if best else "black")  # fmt: skip
    if mark == "second":
        panel.plot([x - 0.15, x + 0.15], [y + 0.36, y + 0.36], color="black", linewidth=0.7)


def _x(number: float) -> float:
    return 2 * _NAME + _CELL * (number + 0.5)
