"""What the tables of `results.py` hold, in Markdown: a function for each, named as pages name it, or a query.

A module for each kind of demo, and one for benchmarks; `recorded.py` has what they share.
"""

from __future__ import annotations

import re

from draftsmith.core.errors import UserError
from draftsmith.core.markdown import Markup
from draftsmith.eval import tables

from . import answers, benchmarks, bounds, clips, compared, pictures, small, tales
from .recorded import TABLES, Rows, about_runs, cells_of_run, table

__all__ = ["TABLES", "answers", "benchmarks", "bounds", "clips", "compared", "markdown", "pictures", "small", "tales"]


def markdown(name: str) -> str:
    """A table, its heading first: of `TABLES`, the N-th that benchmark NAME printed (`printed NAME N`), or columns of
    the cells of a recipe's first run (`cells RECIPE: COLUMN, ...`, `cells RECIPE T=1: COLUMN, ...`).

    Raises:
        UserError: no function or column has this name.
    """
    if query := re.fullmatch(r"printed ([\w-]+) (\d+)", name):
        cells = benchmarks.printed(query[1], int(query[2]) - 1)
    elif query := re.fullmatch(r"cells ([\w-]+)(?: T=(\d))?: (.+)", name):
        cells = cells_of_run(query[1], query[3].split(", "), float(query[2]) if query[2] else None)
    elif name in TABLES:
        cells = TABLES[name]()
    else:
        raise UserError(f"a page marks a table {name!r}, and none has this name", where="scripts/result_tables",
                        hint="correct the mark or add the function")  # fmt: skip
    heading, *rows = ([Markup(cell) for cell in row] for row in cells)  # with marks of their own
    return "\n".join(tables.markdown(tables.words(heading, rows)))


@table
def runs() -> Rows:
    """What was run: every recipe of docs/results."""
    rows = [["recipe", "seeds", "commit", "date", "device", "torch"]]
    for recipe, kept in about_runs().items():
        about = [run["evaluations"][stage]["about"] for run in kept.values() for stage in run["evaluations"]]
        said = [sorted({run["commit"][:7] for run in kept.values()})]
        said += [sorted({one[key] for one in about}) for key in ("date", "device", "torch")]
        rows.append([f"`demo/{recipe}`", ", ".join(sorted(kept, key=int)), *(", ".join(values) for values in said)])
    return rows
