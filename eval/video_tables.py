"""Tables of the video track in the shapes of Sparrow and SAGE, as pure functions of measured requests.

A row is one request decoded by one drafter (`measure_request`) with `set`, `temperature`, `budget` (the visual tokens
asked for, as `data/visual_budget.py` labels them), `visual_tokens` (those that it had) and `max_new_tokens`. Every
number is computed from rows, so shards and interrupted runs merge exactly.
Sources: Sparrow, tables 2 to 6 and 8; SAGE, tables 1 to 6 and figure 3.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..data.visual_budget import visual_tokens
from . import suite_table
from .measure import Row, speedups
from .suite_table import mark
from .tables import markdown_table

Cell = Mapping[str, Any]
PLAIN = "plain decoding"

TAU_NOTE = (
    "tau: tokens emitted after the prefill over verification passes, bonus token included; plain decoding has 1. "
    "DSR and ESR: speedup of decoding alone and end to end, token for token, over plain decoding of the same target in "
    "the same run."
)
SAGE_NOTE = (
    "tau as SAGE counts it: drafted tokens accepted in a verification pass, **without the bonus token**, one less than "
    "in all other tables here. Tokens/s and speedup are of decoding, without the prefill."
)


@dataclass(frozen=True)
class Measure:
    """One number of a cell."""

    key: str  # of a cell
    name: str  # in headings
    unit: str = ""  # behind the number


TAU, DSR, ESR = Measure("tau", "tau"), Measure("DSR", "DSR", "x"), Measure("ESR", "ESR", "x")
TOKENS = Measure("tokens_per_s", "tokens/s")  # end to end
SAGE_TAU = Measure("num_accepted", "tau (no bonus)")
SAGE_TOKENS, SAGE_SPEEDUP = Measure("decoded_per_s", "tokens/s"), Measure("DSR", "speedup", "x")


@dataclass(frozen=True)
class Line:
    """A line of a table; `values` are those of the columns, None where nothing was measured."""

    labels: tuple[str, ...]
    values: tuple[float | None, ...]
    section: str = ""  # lines of a section are compared with one another


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    labels: tuple[str, ...]  # headings of the first columns
    columns: tuple[tuple[str, Measure], ...]  # group (a set, a length) and measure
    lines: tuple[Line, ...]
    marks_best: bool = True
    footnotes: tuple[str, ...] = field(default=())


def cell(rows: Sequence[Row]) -> dict[str, Any]:
    """The numbers of one drafter on some requests; times in seconds are means over requests."""
    found = suite_table.cell(rows)
    total, prefill = sum(r["total_s"] for r in rows), sum(r["prefill_s"] for r in rows)
    # The first token comes from the prefill: it is generated, and in no cycle.
    count, cycles, generated = len(rows), found["cycles"], found["emitted"] + len(rows)
    return {
        **found,
        **speedups(rows),
        "num_accepted": _ratio(sum(sum(r["accepted"]) for r in rows), cycles),
        "tokens_per_s": _ratio(generated, total),
        "decoded_per_s": _ratio(found["emitted"], total - prefill),
        "draft_ms": 1e3 * statistics.fmean(r["draft_s"] for r in rows),
        "generated": generated / count,
        "calls": cycles / count,
        "total_s": total / count,
        "decode_s": (total - prefill) / count,
        "prefill_s": prefill / count,
        "prefill_share": _ratio(prefill, total),
        "step_s": _ratio(total - prefill, cycles),
        "visual_tokens": statistics.fmean(r.get("visual_tokens", 0) for r in rows),
    }


def plain_cell(rows: Sequence[Row]) -> dict[str, Any]:
    """The same of plain decoding, which each row holds beside its drafter's; no tau, no speedup."""
    total, prefill = sum(r["plain_total_s"] for r in rows), sum(r["plain_prefill_s"] for r in rows)
    tokens = sum(r["plain_tokens"] for r in rows)
    return {
        "tokens_per_s": _ratio(tokens, total),
        "decoded_per_s": _ratio(tokens - len(rows), total - prefill),
        "total_s": total / len(rows),
        "prefill_s": prefill / len(rows),
    }


def methods_by(
    rows: Sequence[Row],
    key: str | Callable[[Row], str],
    measures: Sequence[Measure],
    drafters: Mapping[str, Sequence[str]] | Sequence[str],
    *,
    title: str,
    note: str = TAU_NOTE,
    labels: Sequence[str] = ("method",),
    average: bool = False,
    plain: bool = False,
) -> Table:
    """Drafters by groups of requests, a section for each temperature.

    Args:
        key: what a request's group is; groups stand in the order in which they first come up.
        drafters: in the order of the lines; a mapping says what stands in their first columns.
        average: a last group, the unweighted mean over groups.
        plain: a first line in each section.
    """
    group_of = key if callable(key) else lambda row: str(row[key])
    groups = list(dict.fromkeys(group_of(row) for row in rows))
    found: dict[tuple[Any, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.get("temperature", 0), row["drafter"], group_of(row)), []).append(row)
    named = drafters if isinstance(drafters, Mapping) else {name: (name,) for name in drafters}
    assert {row["drafter"] for row in rows} <= set(named), f"drafters that the table has no line for, beside {[*named]}"
    lines = []
    for temperature in sorted({row.get("temperature", 0) for row in rows}):
        section = f"T = {temperature:g}"
        if plain:
            others = [[r for d in named for r in found.get((temperature, d, group), ())] for group in groups]
            values = _line([plain_cell(_one_drafter(some)) if some else None for some in others], measures, average)
            lines.append(Line((PLAIN, *[""] * (len(labels) - 1)), values, section))
        for drafter, shown in named.items():
            cells = [cell(some) if (some := found.get((temperature, drafter, g))) else None for g in groups]
            if any(cells):
                lines.append(Line(tuple(shown), _line(cells, measures, average), section))
    headed = [*groups, "Avg."] if average else groups
    columns = tuple((group, measure) for group in headed for measure in measures)
    return Table(title, note, tuple(labels), columns, tuple(lines), footnotes=_footnotes(rows))


def _line(cells: Sequence[Cell | None], measures: Sequence[Measure], average: bool) -> tuple[float | None, ...]:
    values = [None if found is None else found.get(m.key) for found in cells for m in measures]
    if average:
        values += [_mean(values[place :: len(measures)]) for place in range(len(measures))]
    return tuple(values)


def _one_drafter(rows: Sequence[Row]) -> list[Row]:
    """Each request once: every drafter's row holds the same plain decoding of it."""
    return list({tuple(map(row.get, ("request", "budget", "max_new_tokens"))): row for row in rows}.values())


def sparrow_sets(rows: Sequence[Row], drafters: Sequence[str]) -> Table:
    """tau, ESR and DSR of each set of videos (Sparrow, table 2; table 3 leaves ESR out)."""
    asked = ", ".join(dict.fromkeys(row["budget"] for row in rows if row.get("budget")))
    note = TAU_NOTE + (f" Clips at {asked} visual tokens." if asked else "")
    return methods_by(rows, "set", (TAU, ESR, DSR), drafters, title="Sets of videos", note=note, average=True)


def by_length(rows: Sequence[Row], drafters: Sequence[str]) -> Table:
    """tau and DSR by visual tokens (Sparrow, table 4)."""
    return methods_by(in_order(rows), "budget", (TAU, DSR), drafters, title="By visual tokens")


def ablation(rows: Sequence[Row], parts: Mapping[str, Sequence[bool]], names: Sequence[str]) -> Table:
    """tau with parts of a method on and off, by set and visual tokens (Sparrow, table 6: MTP, IVSB, VATA).

    Args:
        parts: drafter -> for each of `names` whether it is on; heads of other kinds may agree in all.
    """
    shown = {drafter: [drafter, *("yes" if on else "no" for on in switches)] for drafter, switches in parts.items()}
    assert all(len(switches) == len(names) for switches in parts.values()), (parts, names)

    def place(row: Row) -> str:
        return f"{row['set']} {row['budget']}" if row.get("budget") else str(row["set"])

    ordered = in_order(rows)
    sets = list(dict.fromkeys(row["set"] for row in rows))
    ordered = sorted(ordered, key=lambda row: sets.index(row["set"]))
    return methods_by(ordered, place, (TAU,), shown, title="Ablation", labels=("method", *names))


def image_sets(rows: Sequence[Row], drafters: Sequence[str]) -> Table:
    """tau, tokens/s and ESR of each set of pictures (Sparrow, table 8); a drafter without VATA is one of the lines."""
    note = TAU_NOTE + " Tokens/s are end to end."
    return methods_by(rows, "set", (TAU, TOKENS, ESR), drafters, title="Sets of pictures", note=note, average=True)


def sage_sets(rows: Sequence[Row], drafters: Sequence[str], *, title: str = "Sets") -> Table:
    """tau without the bonus, tokens/s and speedup, under plain decoding (SAGE, tables 1 to 5)."""
    measures = (SAGE_TAU, SAGE_TOKENS, SAGE_SPEEDUP)
    return methods_by(rows, "set", measures, drafters, title=title, note=SAGE_NOTE, plain=True)


def by_generated(rows: Sequence[Row], drafters: Sequence[str]) -> Table:
    """tau, as ours and as SAGE's, and tokens/s at 512, 1024, 2048 or other numbers of generated tokens (its figure 3).

    Requests whose answers end before count nowhere, so that the same ones stand at every number.
    """
    ended = {row["request"] for row in rows if row["stop"] != "length"}
    whole = [row for row in rows if row["request"] not in ended]
    ordered = sorted(whole, key=lambda row: int(row["max_new_tokens"]))
    table = methods_by(
        ordered, "max_new_tokens", (TAU, SAGE_TAU, SAGE_TOKENS), drafters, title="By generated tokens",
        note=TAU_NOTE + " No bonus: as SAGE counts tau. Tokens/s are of decoding, without the prefill.",
    )  # fmt: skip
    if not ended:
        return table
    count = len({row["request"] for row in rows})
    told = f"Answers to {len(ended)} of {count} requests ended before: left out; `stop_at_end: false` lets none end."
    return replace(table, footnotes=(*table.footnotes, told))


SHARE = Measure("", "", "%")
_BREAKDOWN = (
    ("tau", "tau", 1.0),
    ("generated tokens", "generated", 1.0),
    ("target calls", "calls", 1.0),
    ("end to end (s)", "total_s", 1.0),
    ("decoding (s)", "decode_s", 1.0),
    ("prefill (s)", "prefill_s", 1.0),
    ("prefill share (%)", "prefill_share", 100.0),
    ("one decoding step (ms)", "step_s", 1e3),
    ("visual tokens, mean", "visual_tokens", 1.0),
)


def breakdown(rows: Sequence[Row], drafter: str) -> Table:
    """What one drafter's requests cost, by visual tokens, as means over requests (Sparrow, table 5)."""
    mine = in_order([row for row in rows if row["drafter"] == drafter])
    lengths = list(dict.fromkeys(row["budget"] for row in mine))
    cells = [cell([row for row in mine if row["budget"] == length]) for length in lengths]
    lines = tuple(Line((name,), tuple(factor * c[key] for c in cells)) for name, key, factor in _BREAKDOWN)
    note = "Generated tokens count the first one, which comes from the prefill and enters no tau."
    plain = Measure("", "")
    return Table(f"Breakdown: {drafter}", note, ("per request",), tuple((at, plain) for at in lengths), lines, False)


# Operation of SAGE's table 6 -> key of a row's `parts_s`.
OPERATIONS = {
    "target prefill": "target_prefill",
    "target verification": "verification",
    "draft prefill": "draft_prefill",
    "draft decoding": "drafting",
    "token pruning": "token_pruning",
    "tree update": "tree_update",
    "others": "others",
}


def time_shares(rows: Sequence[Row], drafters: Sequence[str]) -> Table:
    """Where the time goes, as shares of the whole (SAGE, table 6)."""
    lines = []
    for drafter in drafters:
        mine = [row["parts_s"] for row in rows if row["drafter"] == drafter]
        sums = [sum(parts[key] for parts in mine) for key in OPERATIONS.values()]
        total = sum(sums)
        lines.append(Line((drafter,), (*(100 * _ratio(part, total) for part in sums), 100.0 if total else 0.0)))
    note = (
        "Verification is the target's pass and the acceptance rule; a tree that is grown step by step belongs to draft "
        "decoding, and what is told to it afterwards is the update."
    )
    columns = tuple((name, SHARE) for name in (*OPERATIONS, "total"))
    return Table("Time by operation", note, ("method",), columns, tuple(lines), marks_best=False)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows by the visual tokens that they had, the budgets of fewest tokens first."""
    means: dict[str, list[float]] = {}
    for row in rows:
        means.setdefault(row.get("budget", ""), []).append(row.get("visual_tokens", 0))
    return sorted(rows, key=lambda row: statistics.fmean(means[row.get("budget", "")]))


def markdown(table: Table) -> list[str]:
    """The lines of a page; best and second best of a section are marked as in the suite's tables."""
    lines = [f"## {table.title}", "", table.note, ""]
    head = [*table.labels, *(" ".join(part for part in (group, m.name) if part) for group, m in table.columns)]
    marks = _marks(table)
    sections = list(dict.fromkeys(line.section for line in table.lines))
    body = []
    for line, marked in zip(table.lines, marks, strict=True):
        numbers = [
            "-" if value is None else suite_table.shown(value, best, measure.unit)
            for value, best, (_, measure) in zip(line.values, marked, table.columns, strict=True)
        ]
        body.append([*line.labels, *numbers])
        if len(sections) > 1:
            body[-1].insert(0, line.section)
    lines += markdown_table((["", *head] if len(sections) > 1 else head), body)
    lines += ["", *(f"- {text}" for text in table.footnotes)]
    return [*lines, ""] if table.footnotes else lines


def _marks(table: Table) -> list[list[str]]:
    if not table.marks_best:
        return [[""] * len(table.columns) for _ in table.lines]
    found: list[list[str]] = []
    for section in dict.fromkeys(line.section for line in table.lines):
        mine = [line for line in table.lines if line.section == section]
        compared = [line.values if line.labels[0] != PLAIN else (None,) * len(line.values) for line in mine]
        found += mark(compared)
    return found


def write(folder: Path, tables: Sequence[Table], *, about: Mapping[str, Any]) -> None:
    """`video.md` and `video.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "video.json").write_text(json.dumps({"about": about, "tables": [asdict(t) for t in tables]}, indent=1))
    lines = ["# Speculative decoding of long visual inputs", ""]
    for table in tables:
        lines += [*markdown(table), ""]
    lines += ["## How it was measured", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    (folder / "video.md").write_text("\n".join(lines))


def _footnotes(rows: Sequence[Row]) -> tuple[str, ...]:
    greedy = [row for row in rows if not row.get("temperature", 0)]
    different = [row for row in greedy if not row["identical"]]
    told = []
    if different:
        first = f"first {different[0]['drafter']} in {different[0]['request']}"
        told.append(f"**Outputs differ** from plain decoding in {len(different)} of {len(greedy)} requests, {first}.")
    elif greedy:
        told.append(f"Outputs are identical to plain decoding in all {len(greedy)} greedy requests, every token.")
    short = [r for r in rows if r.get("budget") and r["visual_tokens"] < 0.9 * visual_tokens(r["budget"])]
    if short:
        why = "short clips, or small frames"
        told.append(f"{len(short)} of {len(rows)} requests have fewer visual tokens than asked for: {why}.")
    return tuple(told)


def _mean(values: Sequence[float | None]) -> float | None:
    """None where a value is missing: an average over other sets would not compare."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 0.0
