"""Several drafts on the same requests, side by side: tau of each, and what one of them has over another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .measure import Row, paired_difference, summarize
from .tables import interval, markdown_table

# name -> (draft, draft): what the first has over the second, both among the evaluated ones
Contrasts = Mapping[str, tuple[str, str]]
Results = Mapping[str, Mapping[str, Sequence[Row]]]  # benchmark -> mode -> rows


def side_by_side(results: Results, *, gamma: int) -> dict[str, Any] | None:
    """Benchmark -> mode -> draft -> its summary; None where there is one draft."""
    drafts = {row["drafter"] for modes in results.values() for rows in modes.values() for row in rows}
    if len(drafts) < 2:
        return None
    return {
        benchmark: {
            mode: {draft: summarize(_of(rows, draft), gamma=gamma) for draft in sorted(drafts)}
            for mode, rows in modes.items()
        }
        for benchmark, modes in results.items()
    }


def contrasted(results: Results, contrasts: Contrasts) -> dict[str, Any]:
    """Name -> benchmark -> mode -> tau of the first draft less the second's, paired by request."""
    found: dict[str, Any] = {}
    for name, (first, second) in contrasts.items():
        found[name] = {
            benchmark: {
                mode: paired_difference(_of(rows, first, "draft"), _of(rows, second, "draft"))
                for mode, rows in modes.items()
            }
            for benchmark, modes in results.items()
        }
    return found


def markdown(tables: Mapping[str, Any], contrasts: Mapping[str, Any]) -> list[str]:
    """The lines of two tables: drafts by benchmarks, and contrasts by benchmarks."""
    benchmarks = list(tables)
    modes = {mode: draft for parts in tables.values() for mode, draft in parts.items()}
    lines = ["", "## Draft by draft", ""]
    rows = [
        [draft, mode, *(_cell(tables[benchmark][mode][draft]) for benchmark in benchmarks)]
        for mode, drafts in modes.items()
        for draft in drafts
    ]
    lines += markdown_table(["draft", "mode", *benchmarks], rows)
    lines += ["", "tau [95%]; b: of so many requests the positions go beyond the draft's own.", ""]
    if not contrasts:
        return lines
    rows = [
        [name, mode, *(_difference(found[benchmark][mode]) for benchmark in benchmarks)]
        for name, found in contrasts.items()
        for mode in modes
    ]
    lines += markdown_table(["what it changes", "mode", *benchmarks], rows)
    return [*lines, "", "Difference of tau on the same requests, 95% interval.", ""]


def _of(rows: Sequence[Row], draft: str, name: str | None = None) -> list[Row]:
    """The rows of one draft; under another name, so that two can be paired."""
    return [row if name is None else row | {"drafter": name} for row in rows if row["drafter"] == draft]


def _cell(summary: Mapping[str, Any]) -> str:
    beyond = f" (b {summary['beyond_positions']}/{summary['requests']})" if summary["beyond_positions"] else ""
    return f"{summary['tau']:.2f} {interval(summary['tau_interval'])}{beyond}"


def _difference(found: Mapping[str, Any]) -> str:
    return f"{found['difference']:+.2f} {interval(found['interval'])}"
