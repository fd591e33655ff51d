"""Finished or running runs side by side: settings that differ, training curves, evaluation tables."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import LOG_BYTES, read_json, read_small, read_yaml
from ..core.markdown import plain
from ..core.notices import notice
from ..core.results import DONE, check_written, read_mark
from ..core.tracking import unit
from . import tables
from .run_tables import Cell, cells
from .tables import Table, interval, words

REPORT = "report.json"
# Of a stage's numbers, those that the table shows, and which end of them is the good one.
BEST = {"val_loss": min, "val_accuracy": max, "val_top1": max, "tau": max, "tau_T0": max, "tau_T1": max}


@dataclass(frozen=True)
class Run:
    """One run as its folder tells it."""

    name: str
    settings: dict[str, str]  # dotted key -> value, as the recipe resolved
    curves: dict[str, dict[str, list[tuple[int, float]]]]  # stage -> metric -> (step, value)
    evaluations: dict[str, list[Cell]]  # stage -> what it measured
    folder: Path = Path()
    about: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # stage -> where and how it measured


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs, named by their folders, or by their paths where two folders have one name."""
    names = [folder.resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    return [read_run(folder, names[i] if unique else str(folder)) for i, folder in enumerate(folders)]


def read_run(folder: Path, name: str) -> Run:
    """Raises `UserError` where the folder holds no run, or a file in it cannot be read."""
    if not folder.is_dir():
        raise UserError("no such folder", where=str(folder), hint="give the output folder of a run")
    settings = _settings(folder / "recipe.yaml")
    ordered = list(dict.fromkeys(key.split(".")[1] for key in settings if key.startswith("stages.")))
    stages = sorted((p for p in folder.iterdir() if p.is_dir() and ".before-" not in p.name),
                    key=lambda p: (ordered.index(p.name) if p.name in ordered else len(ordered), p.name))  # fmt: skip
    curves = {p.name: curves_of_stage for p in stages if (curves_of_stage := _curves(p / "metrics.jsonl"))}
    reports = {p.name: report for p in stages if (report := _report(p / REPORT)) is not None}
    evaluations = {name: cells for name, report in reports.items() if (cells := _cells(report, folder / name / REPORT))}
    if not curves and not evaluations:
        raise UserError("nothing was trained or measured here", where=str(folder),
                        hint="give the output folder of a run: it holds a folder for each stage")  # fmt: skip
    about = {name: report.get("about") or {} for name, report in reports.items()}
    return Run(name, settings, curves, evaluations, folder, about)


def _settings(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    return dict(_flat(read_yaml(path, dict[str, Any], hint="restore the file, or run the recipe's command again")))


def _flat(tree: Any, place: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{place}.{key}" if place else str(key))
    else:
        yield place, json.dumps(tree)


def _curves(path: Path) -> dict[str, list[tuple[int, float]]]:
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


def _report(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    if read_mark(path.parent / DONE) is not None:
        check_written(path.parent, only=(REPORT,))
    return read_json(path, dict[str, Any], hint="run its stage again")


def _cells(report: Mapping[str, Any], path: Path) -> list[Cell]:
    try:
        return cells(report)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not a readable report: {error!r}", where=str(path), hint="run its stage again") from error


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(key, its value in each run) of settings that are not the same in all; "-": not set.

    A stage that some run does not have is one line, with its kind.
    """
    keys = list(dict.fromkeys(_short(key, runs) for run in runs for key in run.settings))
    rows = [(key, [run.settings.get(key, run.settings.get(f"{key}.kind", "-")) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1 and key != "output"]


def _short(key: str, runs: Sequence[Run]) -> str:
    """The key, or `stages.NAME` where a run that has settings has no stage of this name."""
    stage = ".".join(key.split(".")[:2])
    if not stage.startswith("stages."):
        return key
    return key if all(f"{stage}.kind" in run.settings for run in runs if run.settings) else stage


def training_rows(runs: Sequence[Run]) -> list[list[str]]:
    """stage, metric, each run's value: the last of a number that falls or rises, the best where it is validated."""
    rows = []
    for stage in dict.fromkeys(stage for run in runs for stage in run.curves):
        of_stage = [run.curves.get(stage, {}) for run in runs]
        last = [max((points[-1][0] for points in curves.values()), default=None) for curves in of_stage]
        rows.append([stage, "steps", *("-" if step is None else f"{step:,}" for step in last)])
        for metric in dict.fromkeys(name for curves in of_stage for name in curves if name == "loss" or name in BEST):
            shown = ["-" if metric not in c else _number(metric, c[metric]) for c in of_stage]
            rows.append([stage, f"{metric} ({'best' if metric in BEST else 'last'})", *shown])
        if any("samples_per_s" in curves for curves in of_stage):
            speeds = [[v for _, v in curves.get("samples_per_s", [])] for curves in of_stage]
            rows.append([stage, "samples/s (median)", *(f"{statistics.median(s):,.1f}" if s else "-" for s in speeds)])
    return rows


def _number(metric: str, points: Sequence[tuple[int, float]]) -> str:
    values = [value for _, value in points]
    return f"{BEST[metric](values) if metric in BEST else values[-1]:.4f}"


def evaluation_rows(runs: Sequence[Run]) -> list[list[str]]:
    """stage, set, method, then tau with its interval and the speedup of each run; cells that any of them measured."""
    cells: dict[tuple[str, str, str], dict[int, Cell]] = {}
    for index, run in enumerate(runs):
        for stage, measured in run.evaluations.items():
            for cell in measured:
                cells.setdefault((stage, cell.where, cell.method), {})[index] = cell
    return [[*place, *(_shown(by_run.get(i)) for i in range(len(runs)))] for place, by_run in cells.items()]


def _shown(cell: Cell | None) -> str:
    if cell is None or cell.tau is None:
        return "-"
    spread = f" {interval(cell.interval)}" if cell.interval else ""
    speedup = f", {cell.speedup:.2f}x" if cell.speedup is not None else ""
    return f"{cell.tau:.2f}{spread}{speedup}"


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """Settings that differ, training and evaluation, with a column for each run; those that have lines."""
    names = [run.name for run in runs]
    note = ("tau: tokens emitted after the prefill over verification passes, bonus token included, with its 95% "
            "interval; then the measured speedup of decoding. Each speedup holds at the tau before it; those of runs "
            "on different machines cannot be compared.")  # fmt: skip
    settings = [[key, *values] for key, values in differences(runs)]
    each = [
        words(["setting", *names], settings, title="Settings that differ"),
        words(["stage", "metric", *names], training_rows(runs), title="Training"),
        words(["stage", "measured on", "method", *names], evaluation_rows(runs), title="Evaluation", note=note),
    ]
    return [table for table in each if table.rows]


def title(runs: Sequence[Run]) -> str:
    """Of the page, in both forms."""
    return f"Runs side by side: {', '.join(run.name for run in runs)}"


def markdown(runs: Sequence[Run], shown: Sequence[Table]) -> str:
    """The page of some tables."""
    lines = [line for table in shown for line in tables.markdown(table)]
    return "\n".join([f"# {plain(title(runs))}", "", *lines])


def panels(runs: Sequence[Run], metrics: Sequence[str] | None = None) -> list[tuple[str, dict[str, list]]]:
    """(title with unit, run -> points) of each curve that is drawn.

    Args:
        metrics: names; None: losses, validated or not, and tau.

    Raises:
        UserError: no run has one of `metrics`.
    """
    present = list(dict.fromkeys(m for run in runs for curves in run.curves.values() for m in curves))
    for metric in metrics or ():
        if metric not in present:
            raise UserError(f"no run has a metric {metric!r}", hint="known metrics: " + ", ".join(present))
    wanted = metrics or [m for m in present if m in ("loss", "val_loss") or m.startswith("tau")]
    groups: list[tuple[str, dict[str, list]]] = []
    for stage in dict.fromkeys(stage for run in runs for stage in run.curves):
        for metric in wanted:
            lines = {run.name: run.curves[stage][metric] for run in runs if metric in run.curves.get(stage, {})}
            if lines:
                groups.append((f"{stage}: {metric}" + (f" ({unit(metric)})" if unit(metric) else ""), lines))
    return groups


def as_data(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page says, for programs."""
    head: Mapping[str, Any] = {"runs": [run.name for run in runs], "settings": dict(differences(runs))}
    return {**head, "training": training_rows(runs), "evaluation": evaluation_rows(runs)}
