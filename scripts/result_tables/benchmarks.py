"""Tables of benchmark scripts and of engines, out of what `results.py measure` kept of their output.

Most are shown as they were printed: a page's mark names the benchmark and the number of its table. Where a script
prints no bound, `BOUNDS` adds it; what does not reach its bound is marked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from draftsmith.core.errors import UserError

from .recorded import RESULTS, Rows, table

FOLDER = RESULTS / "benchmarks"
# Printed tables whose script prints no bounds: (benchmark, number) -> the measured column, how bounds are shown, and
# first cell of a line -> the most that its median may be.
BOUNDS: dict[tuple[str, int], tuple[int, str, dict[str, float]]] = {
    ("loop", 0): (1, "{:g}", {"cycle / (gamma T_q + T_verify)": 1.1, "training step, ours / bare torch": 1.2}),
    ("data", 0): (1, "{:g} s", {"cold (two processes build the index)": 10.0, "warm (the index exists)": 10.0}),
    ("ensemble", 0): (2, "{:g}", {"MTCP": 1.6}),
    ("ensemble", 1): (2, "{:.0%}", {"MT*": 0.05}),
}


@cache
def kept(benchmark: str) -> Mapping[str, Any]:
    """What was kept of one benchmark: command, commit, date, device, torch, load and output."""
    return json.loads((FOLDER / f"{benchmark}.json").read_text())


def all_kept() -> dict[str, Mapping[str, Any]]:
    """Benchmark -> what was kept of it."""
    return {path.stem: kept(path.stem) for path in sorted(FOLDER.glob("*.json"))}


def printed(benchmark: str, number: int = 0) -> Rows:
    """One of the tables in a benchmark's output, its heading first, with its bounds. Other lines between its rows are
    left out.

    Raises:
        UserError: it was not kept, or printed fewer tables.
    """
    if benchmark not in all_kept():
        raise UserError(f"no benchmark {benchmark!r} was kept", where=str(FOLDER), hint="correct the page's mark")
    lines = [line for line in kept(benchmark)["output"] if line.startswith("|")]
    heads = [n for n, line in enumerate(lines[1:]) if re.fullmatch(r"\|( --- \|)+", line)]
    if not 0 <= number < len(heads):
        raise UserError(f"{benchmark} printed {len(heads)} tables, and the page asks for table {number + 1}",
                        where=str(FOLDER), hint="correct the page's mark")  # fmt: skip
    first = heads[number]
    last = heads[number + 1] if number + 1 < len(heads) else len(lines)
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in (lines[first], *lines[first + 2 : last])
    ]
    return judged(rows, *BOUNDS[benchmark, number]) if (benchmark, number) in BOUNDS else rows


def judged(rows: Rows, column: int, form: str, bounds: Mapping[str, float]) -> Rows:
    """Rows with a column `bound`, as `BOUNDS` has it, before the measured one; a median above its bound is marked."""
    heading, *lines = rows
    found = [[*heading[:column], "bound", *heading[column:]]]
    for line in lines:
        most, cell = bounds.get(line[0]), line[column]
        shown = "" if most is None else f"at most {form.format(most)}"
        found.append([*line[:column], shown, missed(cell, most), *line[column + 1 :]])
    assert bounds.keys() <= {line[0] for line in lines}, f"no line for {bounds.keys()}"
    return found


def missed(cell: str, most: float | None) -> str:
    """The cell, in bold and called missed where its first number is above the bound; a percentage counts as a share."""
    number = re.match(r"[\d.]+", cell)
    if most is None or number is None:
        return cell
    value = float(number[0]) / (100 if cell[number.end() :].startswith("%") else 1)
    return f"**{cell}: missed**" if value > most else cell


@table
def benchmark_runs() -> Rows:
    """What was run: every benchmark of docs/results/benchmarks."""
    rows = [["command", "commit", "date", "load before and after"]]
    for about in sorted(all_kept().values(), key=lambda about: about["command"]):
        command = re.sub(r"\{\w+\}", "FOLDER", about["command"].replace("python scripts/", "scripts/"))
        load = " to ".join(map(str, about["load"]))
        rows.append([f"`{command}`", about["commit"][:7], about["date"], load])
    return rows


@table
def states_reading() -> Rows:
    """Rates of reading cached states. The reader that stages use must reach 80% of a plain read."""
    rows = printed("states")
    for line in rows:
        if line[0] == "reader, one thread that reads ahead":
            line[2::2] = [share if int(share.rstrip("%")) >= 80 else f"**{share}: missed**" for share in line[2::2]]
    return rows


@table
def engines_served() -> Rows:
    """A row a drafter, from the engines' tables: drafted chains equal to our loop's, on text and with pictures."""
    counts: dict[tuple[str, str, bool], list[int]] = {}
    whole = ("text", "one picture", "two pictures", "resized picture")  # one request at a time
    lines = [line for name in ("engines", "engines-own") for line in printed(name)[1:] if line[2] in whole]
    for target, drafter, prompts, *_, equal, _ in lines:
        total = counts.setdefault((target, drafter, prompts != "text"), [0, 0])
        total[:] = [one + int(more) for one, more in zip(total, equal.split("/"), strict=True)]
    targets, drafters = ([*dict.fromkeys(column)] for column in list(zip(*lines, strict=True))[:2])
    rows = [["drafter", *(f"{name}: text, pictures" for name in targets)]]
    for drafter in drafters:
        pairs = [[counts.get((target, drafter, seen)) for seen in (False, True)] for target in targets]
        rows.append([drafter, *(", ".join("/".join(map(str, each)) for each in pair if each) for pair in pairs)])
    return rows


@table
def attempts() -> Rows:
    """Attempts to break a run, by kind and seed."""
    seeds = [printed("torture", number) for number in range(3)]
    rows = [["kind", *(f"seed {seed}: tried / held" for seed in range(3))]]
    for kinds in list(zip(*seeds, strict=True))[1:]:
        rows.append([kinds[0][0], *(f"{tried} / {held}" for _, tried, held, *_ in kinds)])
    return rows


@table
def shapes() -> Rows:
    """A head's cycle beside a plain step of targets of several shapes, at three of the printed lengths."""
    heading, *lines = printed("shapes")
    return [heading, *(line for line in lines if line[1] in ("63", "513", "1998"))]


@table
def visual() -> Rows:
    """Image generators: the loop, LANTERN's sets, ADT-Tree's own work. The script prints the bounds."""
    heading, *lines = printed("visual")
    found = [heading]
    for what, bound, wall, thread, pairs in lines:
        most = re.fullmatch(r"at most ([\d.]+)(%?)", bound)
        limit = float(most[1]) / (100 if most[2] else 1) if most else None
        found.append([what, bound, wall, missed(thread, limit), pairs])
    return found


@table
def lantern_residuals() -> Rows:
    """tau of two rules of LANTERN on synthetic sources."""
    found = dict(line.split(": ", 1) for line in _prints("lantern", r"(k \d+.*|exact): \d.*"))  # exact: of all settings
    rows = [["k, delta", "exact", "the paper's rule", "the released rule"]]
    for setting in ("k 30, delta 0.2", "k 120, delta 0.1"):
        rules = [found[f"{setting}, {rule}"] for rule in ("paper", "reference")]
        rows.append([setting, found["exact"], *rules])
    return rows


@table
def sage_growth() -> Rows:
    """tau of SAGE's trees and a static one on synthetic sources."""
    found: dict[str, dict[str, str]] = {}
    for line in _prints("sage", r"\S.*\d\.\d\d \[\d\.\d\d, \d\.\d\d\]"):
        pair, name, value = re.fullmatch(r"(less agreeing|agreeing)\s+(\S.*?)\s+(\d\.\d\d \[.*\])", line).groups()  # type: ignore[union-attr]
        found.setdefault(name, {})[pair] = value
    said = {"static": "static, 25 nodes", "template, cumulative": "template, cumulative (printed, the default)",
            "template, local": "template, local (printed)"}  # fmt: skip
    lines = [[said.get(name, name), by["agreeing"], by["less agreeing"]] for name, by in found.items()]
    return [["tree", "agreeing pair", "less agreeing pair"], *lines]


def _prints(benchmark: str, pattern: str) -> list[str]:
    """Lines of a test's output that match; pytest's progress stands before some."""
    found = (re.search(pattern, line.lstrip(".")) for line in kept(benchmark)["output"])
    return [match[0] for match in found if match]
