"""Tables of sets of conversations (MMSpec, SPEED-Bench): results by category, sub category, difficulty and turn.

MAT and walltime ratio are as MMSpec's released code logs them (its paper: arXiv 2603.14989, section on metrics); beside
them stand tau and ESR, which weigh otherwise. See docs/decisions/departures.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..core.json_types import Json
from .intervals import ratio
from .measured_rows import PLAIN, Row
from .summary import summarize
from .tables import Column, ReportSection, Table, Value, text

NOTE = (
    "n: turns. tau: tokens emitted after the prefill divided by verification passes, bonus token included. MAT: "
    "drafted tokens accepted in a verification pass, without the bonus token. DSR and ESR: speedup of decoding alone "
    "and end to end, of all seconds and tokens together, so that long answers weigh more. Walltime ratio: the mean "
    "over turns of each turn's own end-to-end speedup, so that each weighs the same. Every method goes on from the "
    "target's answers."
)
_TITLES = {"category": "By category", "sub_category": "By sub category", "difficulty": "By difficulty",
           "turn": "By turn"}  # fmt: skip


def walltime_ratio(rows: Sequence[Row]) -> float:
    """Mean over rows of end-to-end tokens per second over plain decoding's; NaN without rows."""
    each = [ratio(row.plain_total_s * (row.num_emitted + 1), row.total_s * row.plain_tokens) for row in rows]
    return statistics.fmean(each) if each else float("nan")


def turns_section(rows: Sequence[Row], notes: Sequence[str] = ()) -> ReportSection | None:
    """The tables, each of the labels in which some set's rows differ; None: there are no conversations."""
    rows = [row for row in rows if row.method != PLAIN and "turn" in row.details]
    if not rows:
        return None
    tables = [table for label in _TITLES if (table := _table(label, rows)) is not None]
    return ReportSection("Sets of conversations", (*notes, *tables), name="turns")


def _table(label: str, rows: Sequence[Row]) -> Table | None:
    groups: dict[tuple[Json, ...], list[Row]] = {}
    several: dict[str, set[Json]] = {}
    for row in rows:
        if (value := row.details.get(label)) is not None:
            groups.setdefault((row.benchmark, value, row.temperature, row.max_new_tokens, row.method), []).append(row)
            several.setdefault(row.benchmark, set()).add(value)
    groups = {key: some for key, some in groups.items() if len(several[key[0]]) > 1}
    if not groups:
        return None
    hot, long = (len({key[place] for key in groups}) > 1 for place in (2, 3))
    columns = (
        text("benchmark"), text(label.replace("_", " ")), *([Column("temperature", "g")] if hot else []),
        *([Column("new", "d")] if long else []), text("method"), Column("n", "d"), Column("tau"), Column("MAT"),
        Column("DSR", unit="x"), Column("ESR", unit="x"), Column("walltime ratio", unit="x"),
    )  # fmt: skip
    lines: list[tuple[Value, ...]] = []
    for key in sorted(groups, key=lambda key: (key[0], str(key[1]), key[2], key[3])):
        benchmark, value, temperature, new, method = key
        summary = summarize(groups[key])
        lines.append((
            benchmark, str(value), *([temperature] if hot else []), *([new] if long else []), method,
            summary.requests, summary.tau, summary.num_accepted, summary.DSR, summary.ESR, walltime_ratio(groups[key]),
        ))  # fmt: skip
    return Table(_TITLES[label], columns, tuple(lines), note=NOTE if label == "category" else "")
