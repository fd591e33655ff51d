"""Tables of demo/compare: every drafter on the same requests."""

from __future__ import annotations

import statistics

from draftsmith.eval import tables

from .recorded import Rows, cells_of, each, methods_of, speed, speeds, table, tau, taus

SETS = ("single", "pairs", "clips")
# What the front pages show of all methods.
SOME = ("draft LVLM, M", "DFlash, chain", "EAGLE-3, chain", "EAGLE-3, tree", "Sparrow half blind, tree", "Medusa, tree",
        "draft LVLM, M, SAGE")  # fmt: skip


def compared() -> list[str]:
    """The methods of demo/compare, in the order of the recipe."""
    return methods_of("compare")


@table
def compare_readme() -> Rows:
    rows = [["method", "single tau", "measured", "pairs tau", "measured", "clips tau", "measured"]]
    for method in SOME:
        both = [cells_of("compare", method, name) for name in SETS]
        rows.append([method, *(text for cells in both for text in (tau(cells), speed(cells)))])
    return rows


@table
def compare() -> Rows:
    """Every method; of each column the best is bold and the second underlined."""
    by_method = {method: [cells_of("compare", method, name) for name in SETS] for method in compared()}
    rows = {method: [method] for method in by_method}
    for place in range(len(SETS)):
        for key, shown in (("tau", tau), ("DSR", speed)):
            means = [statistics.fmean(cell[key] for cell in cells[place]) for cells in by_method.values()]
            for (method, cells), mark in zip(by_method.items(), tables.best(means), strict=True):
                value, *rest = shown(cells[place]).split(" ", 1)
                value = {"best": f"**{value}**", "second": f"<u>{value}</u>"}.get(mark, value)
                rows[method].append(" ".join([value, *rest]))
    heading = ["method", *(text for name in SETS for text in (f"{name} tau [95%]", f"{name} DSR"))]
    return [heading, *rows.values()]


@table
def compare_seeds() -> Rows:
    rows = [["method", *(text for name in SETS for text in (f"{name}: tau", "DSR"))]]
    for method in compared():
        both = [cells_of("compare", method, name) for name in SETS]
        rows.append([method, *(text for cells in both for text in (each(taus(cells)), speeds(cells)))])
    return rows
