"""The figures of `results.py`: what `result_tables` says in numbers, with the spread of the runs."""

from __future__ import annotations

import statistics
from pathlib import Path

from draftsmith.eval.style import COLORS, GREY, WIDEST, errors, panel_grid, save, styled
from result_tables.compared import SETS, compared
from result_tables.recorded import cells_of, student

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"


@styled
def compare(path: Path) -> None:
    """demo/compare: a line for each method, a colour for each set; means of the runs with their intervals."""
    names = compared()
    figure, panels = panel_grid(1, 2, (WIDEST, 0.3 * len(names) + 1.2), sharey=True)
    for panel, key, title in zip(
        panels[0], ("tau", "DSR"), ("tau, 95% interval", "speedup of decoding, range"), strict=True
    ):
        for place, (name, color) in enumerate(zip(SETS, COLORS, strict=False)):
            values = [[cell[key] for cell in cells_of("compare", method, name)] for method in names]
            means = [statistics.fmean(some) for some in values]
            spreads = [student(some)[1:] if key == "tau" else (min(some), max(some)) for some in values]
            rows = [row + 0.22 * (place - 1) for row in range(len(names))]
            panel.errorbar(means, rows, xerr=errors(means, spreads), fmt="o", color=color, markersize=4, elinewidth=1,
                           label=name)  # fmt: skip
        panel.set(xlabel=title)
        panel.grid(axis="both", alpha=0.25)
        panel.axvline(1.0, color=GREY, linewidth=1, linestyle="--")
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].set_ylim(len(names) - 0.5, -0.5)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncol=len(SETS))
    save(figure, path)


def draw() -> None:
    """Every figure, into docs/images."""
    compare(IMAGES / "compare.png")
