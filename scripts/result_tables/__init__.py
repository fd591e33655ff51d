"""What the tables of `results.py` hold, in Markdown: a function for each, named as pages name it, or `printed NAME N`.

A module for each kind of demo, and one for benchmarks; `recorded.py` has what they share.
"""

from __future__ import annotations

import re

from draftsmith.core.markdown import Markup
from draftsmith.eval import tables

from . import answers, benchmarks, bounds, clips, compared, pictures, small, tales
from .recorded import TABLES, Rows, about_runs, table

__all__ = ["TABLES", "answers", "benchmarks", "bounds", "clips", "compared", "markdown", "pictures", "small", "tales"]


def markdown(name: str) -> str:
    """A table, its heading first: of `TABLES`, or the N-th that benchmark NAME printed (`printed NAME N`).

    Raises:
        KeyError: no function has this name.
    """
    query = re.fullmatch(r"printed ([\w-]+) (\d+)", name)
    cells = benchmarks.printed(query[1], int(query[2]) - 1) if query else TABLES[name]()
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
