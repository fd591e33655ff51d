"""What runs say of themselves: an evaluation's cells by its report.json, and settings and curves by a run's folder.

For trackers, model cards, the end of a run, and comparisons of runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import UserError
from ..core.files import LOG_BYTES, read_json, read_small, read_yaml
from ..core.json_types import JsonMapping, JsonObject, flat, object_at
from ..core.ranks import notice
from ..core.results import DONE, check_written, read_mark
from .cells import Cell, labels, rule_column
from .tables import Column, Table, text

REPORT = "report.json"
EXAMPLES = "examples.txt"  # of an evaluation: lines for the end of its run
COLOURED = ("\x1b[32m", "\x1b[0m")  # around what was proposed in them
COLUMNS = ("measured on", "method", "requests", "tau", "tau 95% low", "tau 95% high", "speedup of decoding",
           "identical")  # fmt: skip
NEWER: JsonObject = {"drafters": (), "relaxed": False, "expected_speedup": None, "DSR_spread": None,
                     "engine": "", "concurrency": 1, "rule": ""}  # than the oldest report  # fmt: skip
_NEEDED = {"benchmark", "turn", "budget", "temperature", "max_new_tokens", "method", "requests", "tau", "tau_interval",
           "DSR", "ESR", "identical", "exact"}  # fmt: skip


def cells(report: JsonMapping) -> list[Cell]:
    """Every cell of a `report.json`, in its order; None: not measured. Raises `KeyError`: an older version wrote it."""
    if missing := [key for cell in report["cells"] for key in sorted(_NEEDED - cell.keys())]:
        raise KeyError(missing[0])
    read = [Cell(**NEWER | {"answers": cell["requests"]} | cell) for cell in report["cells"]]
    label = labels(read)
    for cell in read:
        cell.where = label(cell)
    return read


def readable(cell: Cell) -> list[object]:
    """The cell under `COLUMNS`."""
    return [cell.where, cell.method, cell.requests, cell.tau, *cell.tau_interval, cell.DSR, _same(cell)]


def overview(measured: Sequence[Cell]) -> Table:
    """What a model card says of an evaluation; of suites the first turns."""
    rules = rule_column(measured)
    columns = (text("measured on"), text("method"), *(column for column, _ in rules), Column("temperature", "g"),
               Column("n", "d"), Column("tau [95%]", kind="interval"), Column("decoding", unit="x"),
               Column("end to end", unit="x"), Column("same tokens as plain", kind="count"))  # fmt: skip
    return Table("", columns, tuple(
        (c.where, c.method, *(value(c) for _, value in rules), c.temperature, c.requests, (c.tau, *c.tau_interval),
         c.DSR, c.ESR, (_same(c), c.answers))
        for c in measured if c.turn in ("", "first")
    ))  # fmt: skip


def _same(cell: Cell) -> int | None:
    """Answers whose tokens are plain decoding's; None where they need not be."""
    return cell.identical if cell.exact else None


@dataclass(frozen=True)
class Run:
    """One run as its folder tells it."""

    name: str
    settings: dict[str, str]  # dotted key -> value, as the recipe resolved
    stages: JsonMapping  # of the recipe
    curves: dict[str, dict[str, list[tuple[int, float]]]]  # stage -> metric -> (step, value)
    evaluations: dict[str, list[Cell]]  # stage -> what it measured
    folder: Path
    about: Mapping[str, JsonMapping]  # stage -> where and how it measured


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs, named by their folders, or by their paths where two folders have one name."""
    names = [folder.resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    return [read_run(folder, names[i] if unique else str(folder)) for i, folder in enumerate(folders)]


def read_run(folder: Path, name: str) -> Run:
    """Raises `UserError` where the folder holds no run, or a file in it cannot be read."""
    if not folder.is_dir():
        raise UserError("no such folder", where=str(folder), hint="give the output folder of a run")
    path, recipe = folder / "recipe.yaml", {}
    if path.is_file():
        recipe = read_yaml(path, JsonObject, hint="restore the file, or run the recipe's command again")
    settings = {key: json.dumps(value) for key, value in flat(recipe).items()} if path.is_file() else {}
    ordered = list(dict.fromkeys(key.split(".")[1] for key in settings if key.startswith("stages.")))
    folders = sorted((p for p in folder.iterdir() if p.is_dir() and ".before-" not in p.name),
                     key=lambda p: (ordered.index(p.name) if p.name in ordered else len(ordered), p.name))  # fmt: skip
    curves = {p.name: curves_of_stage for p in folders if (curves_of_stage := read_curves(p / "metrics.jsonl"))}
    evaluations, about = {}, {}
    for path in (p / REPORT for p in folders):
        if path.is_file():
            if read_mark(path.parent / DONE) is not None:
                check_written(path.parent, only=(REPORT,))
            report = read_json(path, JsonObject, hint="run its stage again")
            about[path.parent.name] = report.get("about") or {}
            try:
                measured = cells(report)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"not a readable report: {error!r}", where=str(path),
                                hint="run its stage again") from error  # fmt: skip
            if measured:
                evaluations[path.parent.name] = measured
    if not curves and not evaluations:
        raise UserError("nothing was trained or measured here", where=str(folder),
                        hint="give the output folder of a run: it holds a folder for each stage")  # fmt: skip
    return Run(name, settings, object_at(recipe, "stages") or {}, curves, evaluations, folder, about)


def read_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Numbers by step. A line that a crash or a full disk has cut off is passed over, and said."""
    curves: dict[str, list[tuple[int, float]]] = {}
    damaged = 0
    for line in read_small(path, hint="", max_bytes=LOG_BYTES).splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            damaged += 1
            continue
        for name, value in row.items():
            if name not in ("step", "time") and isinstance(value, int | float) and math.isfinite(value):
                curves.setdefault(name, []).append((step, float(value)))
    if damaged:
        notice(f"{path}: {damaged} damaged or cut lines are skipped (a run that was killed leaves one)")
    return curves
