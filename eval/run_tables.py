"""What any track's evaluation measured, as plain rows: one for each method on each set of requests.

Reports differ by track (`report.py`, `visual_report.py`, `reading_report.py`, `suite_table.py`); trackers and
comparisons of runs want one shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

COLUMNS = (
    "measured on",
    "method",
    "requests",
    "tau",
    "tau 95% low",
    "tau 95% high",
    "speedup of decoding",
    "identical",
)


@dataclass(frozen=True)
class Cell:
    """One method on one set of requests; None: not measured."""

    where: str
    method: str
    requests: int
    tau: float  # tokens per target pass, bonus token included
    interval: tuple[float, float] | None  # 95%, of tau
    speedup: float | None  # of decoding, against plain decoding in the same run
    identical: int | None  # requests whose tokens are plain decoding's


def cells(report: Mapping[str, Any]) -> list[Cell]:
    """Every cell of a report or of a suite's table, in its order."""
    return [_cell(where, method, found) for where, method, found in _places(report)]


def readable(cell: Cell) -> list[Any]:
    """The cell under `COLUMNS`."""
    low, high = cell.interval or (None, None)
    return [cell.where, cell.method, cell.requests, cell.tau, low, high, cell.speedup, cell.identical]


def _places(report: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    found = report.get("cells")
    if isinstance(found, list):  # long visual inputs
        for cell in found:
            at = f" at {cell['budget']}" if cell.get("budget") else ""
            where = f"{cell['set']}{at}, T {cell['temperature']:g}, {cell['max_new_tokens']} new"
            yield where, cell["method"], cell
    elif isinstance(found, Mapping):  # the suite
        for drafter, modes in found.items():
            for mode, sets in modes.items():
                for name, turns in sets.items():
                    for turn, cell in turns.items():
                        yield f"{name}, {turn}", f"{drafter} {mode}", cell
    else:  # benchmarks and modes, or temperatures and methods of an image generator
        for where, methods in report.get("tables", {}).items():
            for method, cell in methods.items():
                if isinstance(cell, Mapping) and "tau" in cell:
                    yield f"T {float(where):g}" if "grid" in report else where, method, cell


def _cell(where: str, method: str, found: Mapping[str, Any]) -> Cell:
    ends = found.get("tau_interval")
    speedup = found.get("DSR", found.get("SR"))
    return Cell(
        where,
        method,
        int(found.get("requests", found.get("n", 0))),
        float(found["tau"]),
        (float(ends[0]), float(ends[1])) if ends else None,
        None if speedup is None else float(speedup),
        found.get("identical"),
    )
