"""Tables of demo/smollm2 and demo/smollm2-full: drafters of a small real model, one run each."""

from __future__ import annotations

from .recorded import Rows, methods_of, of_one, ratio_of_run, same, table, tau_of_run

_SHORT, _FULL = "smollm2", "smollm2-full"
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


@table
def smollm2() -> Rows:
    """All rows of the short form."""
    return _every(_SHORT)


@table
def smollm2_full() -> Rows:
    """All rows of the full form."""
    return _every(_FULL)


def _every(recipe: str) -> Rows:
    rows = [["T", "method", "n", "identical", "tau [95%]", "T_q/T_p", "expected", "DSR [IQR]"]]
    for temperature in (0.0, 1.0):
        for method in methods_of(recipe, temperature):
            cell = of_one(recipe, 0, method, temperature=temperature)
            rows.append([f"{temperature:g}", method, f"{cell['requests']}", "-" if temperature else same(cell),
                         tau_of_run(cell), f"{cell['T_q_over_T_p']:.2f}", f"{cell['expected_speedup']:.2f}x",
                         ratio_of_run(cell)])  # fmt: skip
    return rows
