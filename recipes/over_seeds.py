"""Runs of one recipe that differ only in their seed: a row for each method, with its spread over the seeds.

A claim about a method needs more than one training. Each run trains everything anew from its own seed, so that the
spread holds the synthetic data, the weights and the order of the data.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..eval.intervals import student_half_width
from ..eval.run_tables import Cell
from ..eval.side_by_side import Run
from ..eval.tables import Column, Table, text
from .schema import Recipe

# What may differ between runs of one recipe.
_FREE = ("seed", "output")
NOTE = (
    "tau: its mean over the seeds, with Student's 95% interval, which two seeds do not give. Measured: the mean over "
    "the seeds of the speedup of decoding, with the lowest and the highest. Each run trained everything anew from its "
    "seed."
)
_COLUMNS = (
    text("method"), text("tau of each seed"), Column("tau [95%]", kind="interval"), text("measured in each run"),
    Column("measured [range]", unit="x", kind="interval"), Column("same tokens", kind="count"),
)  # fmt: skip


def tables(runs: Sequence[Run]) -> list[Table]:
    """A table for each set of requests, temperature and number of new tokens of a recipe that has several seeds."""
    return [_table(group, where, by_method) for group in _groups(runs) for where, by_method in _measured(group).items()]


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs with equal settings and different seeds, each group in the order of its seeds."""
    alike: dict[tuple[tuple[str, str], ...], dict[int, Run]] = {}
    for run in runs:
        recipe = tuple(sorted((key, value) for key, value in run.settings.items() if key not in _FREE))
        alike.setdefault(recipe, {}).setdefault(_seed(run), run)
    return [[by_seed[seed] for seed in sorted(by_seed)] for by_seed in alike.values() if len(by_seed) > 1]


def _seed(run: Run) -> int:
    """Of a run; a recipe that names none has the schema's default, which `recipe.yaml` does not write down."""
    return int(run.settings.get("seed", Recipe.model_fields["seed"].default))


def _measured(group: Sequence[Run]) -> dict[str, dict[str, list[Cell]]]:
    """Where -> method -> its cell in each run; only what all runs of the group have measured."""
    cells: dict[str, dict[str, list[Cell]]] = {}
    for run in group:
        for stage, measured in run.evaluations.items():
            of = f" (stage {stage})" if len(run.evaluations) > 1 else ""
            for cell in measured:
                where = f"{cell.requests_of}, T {cell.temperature:g}, {cell.max_new_tokens} new tokens{of}"
                cells.setdefault(where, {}).setdefault(cell.method, []).append(cell)
    complete = {
        where: {name: each for name, each in by_method.items() if len(each) == len(group)}
        for where, by_method in cells.items()
    }
    return {where: by_method for where, by_method in complete.items() if by_method}


def _table(group: Sequence[Run], where: str, by_method: dict[str, list[Cell]]) -> Table:
    seeds = ", ".join(str(_seed(run)) for run in group)
    rows = tuple(_row(method, cells) for method, cells in by_method.items())
    return Table(f"Over seeds {seeds}: {where}", _COLUMNS, rows, note=NOTE, compared=())


def _row(method: str, cells: Sequence[Cell]) -> tuple:
    taus = [cell.tau for cell in cells if cell.tau is not None]
    is_whole = len(taus) == len(cells)  # a mean over some of the seeds is none over all
    mean = statistics.fmean(taus) if is_whole else 0.0
    half = student_half_width(statistics.stdev(taus), len(taus)) if is_whole else 0.0
    speeds = [cell.speedup for cell in cells if cell.speedup is not None]
    spread = (statistics.fmean(speeds), min(speeds), max(speeds)) if len(speeds) == len(cells) else None
    exact = [cell for cell in cells if cell.identical is not None]
    same = (sum(c.identical or 0 for c in exact), sum(c.requests for c in exact)) if exact else None
    relaxed = any(cell.relaxed for cell in cells) and "relaxed" not in method
    return (
        f"{method} (relaxed)" if relaxed else method,
        ", ".join("-" if cell.tau is None else f"{cell.tau:.2f}" for cell in cells),
        (mean, mean - half, mean + half) if is_whole and len(taus) > 2 else None,
        ", ".join("-" if cell.speedup is None else f"{cell.speedup:.2f}x" for cell in cells) if speeds else None,
        spread,
        same,
    )
