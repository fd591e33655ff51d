"""Tables of the suite in the article's shape: methods by sets, first and second turns, averages, best and second best.

A row of measurements is one request in one mode (`measure_request`) with the keys `set`, `turn` (first, or the task of
a second turn) and `mode`. Every number is computed from such rows, so shards and interrupted runs merge exactly.
Source: TABED, tables 1, 2 and 10 to 14.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .measure import Row

FIRST = "first"
AVERAGE = "Avg."


@dataclass(frozen=True)
class SetInfo:
    """A column: the set's group (benchmark or ood), and what stands in for it."""

    group: str
    label: str = ""


@dataclass(frozen=True)
class Plan:
    """What was asked for, in the order of the tables."""

    sets: Mapping[str, SetInfo]
    dependent: Sequence[str]  # tasks that the second turn of a set is the mean of
    free: Sequence[str]  # tasks with a column of their own: the mean over the benchmark sets
    drafters: Sequence[str]
    modes: Sequence[str]

    def of_group(self, group: str) -> list[str]:
        return [name for name, info in self.sets.items() if info.group == group]


def build(rows: Iterable[Row], plan: Plan, *, about: dict[str, Any], notes: Sequence[str] = ()) -> dict[str, Any]:
    """The tables as data, with each cell's own numbers (`cells`: drafter, mode, set, turn)."""
    grouped: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["drafter"], row["mode"], row["set"], row["turn"]), []).append(row)
    cells: dict[str, Any] = {}
    for (drafter, mode, name, turn), found in sorted(grouped.items()):
        place = cells.setdefault(drafter, {}).setdefault(mode, {}).setdefault(name, {})
        place[turn] = cell(found)
    first_rows = [row for found in grouped.values() for row in found if row["turn"] == FIRST]
    tables = {"first": _first_turns(plan, cells)}
    if plan.dependent or plan.free:
        tables["second"] = _second_turns(plan, cells)
    tables["summary"] = _summary(plan, tables, first_rows)
    return {"about": about, "tables": tables, "cells": cells, "notes": [*notes, *_notes(plan, cells, about)]}


def cell(rows: Sequence[Row]) -> dict[str, Any]:
    """One set, turn and method: tau over all its requests, with a 95% interval over resampled ones."""
    rows = sorted(rows, key=lambda row: row["request"])
    emitted, cycles = [r["emitted"] for r in rows], [r["cycles"] for r in rows]
    return {
        "tau": sum(emitted) / sum(cycles) if sum(cycles) else 1.0,
        "tau_interval": _interval(emitted, cycles),
        "requests": len(rows),
        "emitted": sum(emitted),
        "cycles": sum(cycles),
        "identical": sum(r["identical"] for r in rows),
        "beyond_positions": sum(r.get("beyond_positions", False) for r in rows),
    }


def _interval(emitted: Sequence[int], cycles: Sequence[int], draws: int = 1000) -> tuple[float, float]:
    """95% interval of tau over resampled requests; there are hundreds of cells, so all draws at once."""
    picks = np.random.default_rng(0).integers(len(cycles), size=(draws, len(cycles)))
    wholes = np.asarray(cycles)[picks].sum(1)
    values = np.sort(np.where(wholes > 0, np.asarray(emitted)[picks].sum(1) / np.maximum(wholes, 1), 1.0))
    return float(values[int(0.025 * draws)]), float(values[int(0.975 * draws)])


def _first_turns(plan: Plan, cells: dict[str, Any]) -> dict[str, Any]:
    benchmark, ood = plan.of_group("benchmark"), plan.of_group("ood")

    def values(drafter: str, mode: str) -> list[float | None]:
        taus = {name: _tau(cells, drafter, mode, name, FIRST) for name in (*benchmark, *ood)}
        return [*(taus[b] for b in benchmark), _mean([taus[b] for b in benchmark]), *(taus[o] for o in ood)]

    columns = [*(_heading(plan, b) for b in benchmark), AVERAGE, *(_heading(plan, o) for o in ood)]
    return _table("First turn", columns, plan, values, groups={"OOD": len(ood)})


def _second_turns(plan: Plan, cells: dict[str, Any]) -> dict[str, Any]:
    benchmark = plan.of_group("benchmark")

    def values(drafter: str, mode: str) -> list[float | None]:
        taus = [
            _mean([_tau(cells, drafter, mode, name, task) for task in plan.dependent]) if plan.dependent else None
            for name in benchmark
        ]
        free = [_mean([_tau(cells, drafter, mode, name, task) for name in benchmark]) for task in plan.free]
        return [*taus, _mean(taus), *free]

    columns = [*(_heading(plan, b) for b in benchmark), AVERAGE, *plan.free]
    return _table("Second turn", columns, plan, values, groups={"NLP": len(plan.free)})


def _summary(plan: Plan, tables: dict[str, Any], first_rows: Sequence[Row]) -> dict[str, Any]:
    """Averages alone (table 2), and the measured speedup of decoding over all first turns."""
    averages = {
        name: {(row["drafter"], row["mode"]): row["values"][table["columns"].index(AVERAGE)] for row in table["rows"]}
        for name, table in tables.items()
    }
    num_ood = tables["first"]["groups"]["OOD"]
    ood = {
        (row["drafter"], row["mode"]): _mean(row["values"][len(row["values"]) - num_ood :])
        for row in tables["first"]["rows"]
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    for row in first_rows:
        sums = seconds.setdefault((row["drafter"], row["mode"]), [0.0, 0.0])
        sums[0] += row["plain_total_s"] - row["plain_prefill_s"]
        sums[1] += row["total_s"] - row["prefill_s"]

    def values(drafter: str, mode: str) -> list[float | None]:
        key = (drafter, mode)
        plain, drafted = seconds.get(key, (0.0, 0.0))
        return [*(averages[name][key] for name in averages), ood[key], plain / drafted if drafted > 0 else None]

    columns = [*(tables[name]["title"] for name in averages), "OOD", "DSR"]
    return _table("Averages", columns, plan, values, groups={})


def _table(
    title: str,
    columns: list[str],
    plan: Plan,
    values: Callable[[str, str], list[float | None]],
    *,
    groups: dict[str, int],
) -> dict[str, Any]:
    """`groups`: how many of the last columns have a heading of their own."""
    rows: list[dict[str, Any]] = [
        {"drafter": d, "mode": m, "values": values(d, m)} for d in plan.drafters for m in plan.modes
    ]
    for drafter in plan.drafters:
        mine = [row for row in rows if row["drafter"] == drafter]
        for row, marks in zip(mine, mark([row["values"] for row in mine]), strict=True):
            row["marks"] = marks
    return {"title": title, "columns": columns, "groups": groups, "rows": rows}


def mark(values: Sequence[Sequence[float | None]]) -> list[list[str]]:
    """best and second of each column, as printed: what prints alike is marked alike."""
    found = [[""] * len(row) for row in values]
    for column in range(len(values[0]) if values else 0):
        printed = [None if row[column] is None else round(row[column], 2) for row in values]  # type: ignore[arg-type]
        ranks = sorted({value for value in printed if value is not None}, reverse=True)
        for place, value in enumerate(printed):
            if len(ranks) > 1 and value in ranks[:2]:
                found[place][column] = ("best", "second")[ranks.index(value)]
    return found


def write(folder: Path, built: dict[str, Any]) -> None:
    """`suite.json`, `suite.md` and a picture of the tables."""
    from .suite_plots import draw_tables

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "suite.json").write_text(json.dumps(built, indent=1))
    (folder / "suite.md").write_text(markdown(built))
    draw_tables(folder / "suite.png", list(built["tables"].values()))


def markdown(built: dict[str, Any]) -> str:
    lines = ["# The suite: block efficiency of each method on each set", ""]
    for table in built["tables"].values():
        lines += [f"## {table['title']}", ""]
        lines += _line(["draft", "method", *table["columns"]]) + _line(["---"] * (2 + len(table["columns"])))
        for row in table["rows"]:
            lines += _line([row["drafter"], row["mode"], *map(shown, row["values"], row["marks"])])
        lines.append("")
    lines += [
        "**Best** and <u>second best</u> of each draft's methods. Cells are tau: tokens emitted after the prefill over "
        "verification passes, bonus token included; plain decoding has 1. Averages are unweighted over sets; the "
        "second turn of a set is the mean over its tasks. DSR: measured speedup of decoding on first turns. "
        "suite.json has n, a 95% interval and more for every cell.",
        "",
        "![the tables](suite.png)",
        "",
        *(f"- {note}" for note in built["notes"]),
        "",
        "## How it was measured",
        "",
        *(f"- {key}: {value}" for key, value in built["about"].items()),
        "",
    ]
    return "\n".join(lines)


def shown(value: float | None, mark: str, unit: str = "") -> str:
    text = "" if value is None else f"{value:.2f}{unit}"
    return {"best": f"**{text}**", "second": f"<u>{text}</u>"}.get(mark, text)


def _notes(plan: Plan, cells: dict[str, Any], about: dict[str, Any]) -> list[str]:
    every = [
        (drafter, mode, name, turn, found)
        for drafter, modes in cells.items()
        for mode, sets in modes.items()
        for name, turns in sets.items()
        for turn, found in turns.items()
    ]
    notes = []
    if about.get("temperature", 0) == 0:
        different = [(d, m, n, t) for d, m, n, t, c in every if c["identical"] < c["requests"]]
        if different:
            notes.append(f"**Outputs differ** from plain decoding, first in: {', '.join(different[0])}.")
        else:
            total = sum(c["requests"] for *_, c in every)
            notes.append(f"Outputs are identical to plain decoding in all {total} decoded requests, every token.")
    far: dict[str, list[str]] = {}
    for _, mode, name, turn, found in every:
        if found["beyond_positions"]:
            far.setdefault(mode, []).append(f"{name} ({turn})")
    for mode, places in far.items():
        names = ", ".join(dict.fromkeys(places))
        notes.append(f"**Requests beyond the draft's positions** in mode {mode}: {names}. It was not trained there.")
    stand_ins = [f"{name} by {info.label}" for name, info in plan.sets.items() if info.label]
    if stand_ins:
        notes.append(f"Local stand-ins, not the published sets: {', '.join(stand_ins)}.")
    return notes


def _heading(plan: Plan, name: str) -> str:
    label = plan.sets[name].label
    return f"{name} ({label})" if label else name


def _tau(cells: dict[str, Any], drafter: str, mode: str, name: str, turn: str) -> float | None:
    found = cells.get(drafter, {}).get(mode, {}).get(name, {}).get(turn)
    return None if found is None else found["tau"]


def _mean(values: Sequence[float | None]) -> float | None:
    """None where a value is missing: an average over other sets would not compare."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _line(words: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(words) + " |"]
