"""The front page's table of demo/smollm2-full: drafters of a small real model, one run."""

from __future__ import annotations

from .recorded import Rows, of_one, ratio_of_run, same, table, tau_of_run

_FULL = "smollm2-full"
_FEW = (
    "EAGLE-3, tree of 12",
    "DFlash, chain of 5",
    "DSpark, chain of 5",
    "Medusa, chain of 3",
    "prompt lookup, chain",
    "suffix lookup, chain",
)


@table
def smollm2_full_readme() -> Rows:
    """The fastest row of each drafter in the full form's run, and what is free."""
    rows = [["drafter", "tau [95%]", "measured [IQR]", "identical", "at temperature 1"]]
    for method in _FEW:
        cell, drawn = (of_one(_FULL, 0, method, temperature=t) for t in (0.0, 1.0))
        rows.append([method, tau_of_run(cell), ratio_of_run(cell), same(cell),
                     f"{drawn['tau']:.2f}, {drawn['DSR']:.2f}x"])  # fmt: skip
    return rows
