"""Runs compared: a leaderboard of all methods, runs of one recipe over its seeds, and runs side by side.

Methods are compared where they measured the same thing: one table for each target, set of requests, temperature and
number of new tokens. What a run's folder does not say is a dash, with its reason below the table. A claim about a
method needs more than one training: runs that differ only in their seed get a row for each method with its spread.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject
from ...core.markdown import plain
from ...core.results import DONE, read_mark
from ...eval.cells import Cell, set_name
from ...eval.run_reports import Run
from ...eval.summary import student_interval
from ...eval.tables import Column, Table, Value, text
from ...eval.tables import markdown as table_markdown
from ...trainers.publish.lineage import trained_by
from ..config.schema import Recipe

# Of a stage's numbers, those that the table shows: which of them, and how it is written. Validation shows the best.
SHOWN: dict[str, tuple[str, Callable[[list[float]], float], str]] = {
    "loss": ("loss (last)", lambda values: values[-1], ".4f"),
    "val_loss": ("val_loss (best)", min, ".4f"),
    **{n: (f"{n} (best)", max, ".4f") for n in ("val_accuracy", "val_top1", "tau", "tau_T0", "tau_T1")},
    "samples_per_s": ("samples/s (median)", statistics.median, ",.1f"),
}
MIB, OWN_TARGET, _WEIGHTS = 2**20, "trained in this run", "model*.safetensors"
_SEED = str(Recipe.model_fields["seed"].default)  # of a recipe that names none: `recipe.yaml` does not write it down
_FREE = ("seed", "output")  # what may differ between runs of one recipe
_COSTS = ("memory", "steps", "samples", "hours", "gpu_hours", "rank_hours")
LEADERBOARD = (
    "Exact methods come first, the fastest at the top; relaxed ones follow. "
    "tau: tokens for each pass of the target, bonus token included, with its 95% interval; plain decoding has 1. "
    "Expected: the speedup of decoding that tau and the measured cost of a cycle promise. Measured: against plain "
    "decoding of the same target in the same run, with the quartiles over requests. Drafter MiB: the size of its files "
    "of weights, without the target's tables that a head shares. Training: optimizer steps, samples and wall time of "
    "the stages that trained the drafter, of their last start, and that time multiplied by the GPUs that all ranks "
    "held (GPU-hours; where nothing was trained on a GPU, by the ranks: rank-hours); answers and states that other "
    "stages prepared are not counted."
)
SEEDS = (
    "tau: its mean over the seeds, with Student's 95% interval, which two seeds do not give. Measured: the mean over "
    "the seeds of the speedup of decoding, with the lowest and the highest. Each run trained everything anew from its "
    "seed."
)

# The leaderboard: each method's results, its drafter's memory, and the cost of its training


class Entry(SimpleNamespace):
    """A cell of a run, with `run`, `stage`, `target`, `device` and `_COSTS`; None: not known, and `unknown` says why.
    `memory` is in bytes; `gpu_hours` is 0 on CPUs.
    """


def entries(runs: Sequence[Run]) -> list[Entry]:
    """Return an entry of every cell of every run, in their order."""
    return [_entry(run, stage, cell) for run in runs for stage, each in run.evaluations.items() for cell in each]


def _entry(run: Run, stage: str, cell: Cell) -> Entry:
    about, (costs, why) = run.about.get(stage, {}), _costs(run, cell.drafters)
    empty = "no cycle was run: every answer ended with its first token" if cell.tau is None else ""
    return Entry(**vars(cell), **dict.fromkeys(_COSTS) | costs, run=run.name, stage=stage, target=_target(run, about),
                 device=about.get("device") or "not said", unknown=[*filter(None, (empty, why))])  # fmt: skip


def _target(run: Run, about: JsonMapping) -> str:
    """The target's name; of one that its run trained the hash of its weights, since two runs train two targets."""
    name = str(about.get("target") or "not said")
    if name != OWN_TARGET:
        return name
    trained = [n for n, stage in run.stages.items() if stage.get("kind") == "train" and stage.get("model") == "target"]
    mark = read_mark(run.folder / trained[-1] / DONE) if trained else None
    files = (mark.files or {}) if mark is not None else {}
    weights = sorted(name for name in files if Path(name).match(_WEIGHTS))
    return f"of weights {files[weights[0]].xxh3[:8]}" if weights else f"trained in {run.name}"


def _costs(run: Run, drafters: Sequence[str]) -> tuple[JsonObject, str]:
    """Those of `_COSTS` that the run's folder tells of these drafters together, and why it does not tell the others."""
    if not drafters:
        return {}, "its drafter is the target, or has no weights of its own"
    for name in drafters:
        if name not in run.stages or not (run.folder / name).is_dir():
            return {}, f"{name} is no stage of this run: it was trained elsewhere"
        if not any((run.folder / name).glob(_WEIGHTS)):
            return {}, f"stage {name} has left no model.safetensors"
    memory = sum(path.stat().st_size for name in drafters for path in (run.folder / name).glob(_WEIGHTS))
    try:  # a stage that two members of an ensemble began with counts once
        stages = list(dict.fromkeys(stage for drafter in drafters for stage in trained_by(run.stages, drafter)))
    except (KeyError, ValueError, AttributeError):
        return {"memory": memory}, f"its recipe.yaml does not say how stages {', '.join(drafters)} were trained"
    unrecorded, steps, samples = "", 0, 0
    hours = gpu_hours = rank_hours = 0.0
    for name in stages:
        last = max((step for points in run.curves.get(name, {}).values() for step, _ in points), default=0)
        batch_size, mark = run.stages[name].get("batch_size"), read_mark(run.folder / name / DONE)
        if not last or not isinstance(batch_size, int):
            why = f"stage {name} has left no metrics.jsonl, or its recipe names no batch size"
            return {"memory": memory}, why
        if mark is None or mark.seconds is None:
            return {"memory": memory}, f"stage {name} has not recorded how long it trained"
        steps, samples = steps + last, samples + last * batch_size
        hours += (time := mark.seconds / 3600)
        if mark.ranks is None or mark.gpus is None:
            unrecorded = unrecorded or f"stage {name} was trained by an earlier version, which did not record its ranks"
        else:
            gpu_hours, rank_hours = gpu_hours + time * mark.gpus, rank_hours + time * mark.ranks
    by_ranks = () if unrecorded else (gpu_hours, rank_hours)
    return dict(zip(_COSTS, (memory, steps, samples, hours, *by_ranks), strict=False)), unrecorded


def boards(entries: Sequence[Entry]) -> list[Table]:
    """A table for each target, set of requests, temperature and length, the fastest exact method first."""
    groups: dict[str, list[Entry]] = {}
    for e in entries:
        groups.setdefault(f"Leaderboard: {_where(e)}, target {e.target}", []).append(e)
    return [_board(title, members, LEADERBOARD if not n else "") for n, (title, members) in enumerate(groups.items())]


def _where(cell: Cell | Entry) -> str:
    return f"{set_name(cell)}, T {cell.temperature:g}, {cell.max_new_tokens} new tokens"


def _board(title: str, members: Sequence[Entry], note: str) -> Table:
    members = sorted(members, key=lambda e: (e.relaxed, -(e.DSR or 0)))
    on_gpus = any(entry.gpu_hours for entry in members)
    columns = (
        text("run"), text("method"), Column("n", "d", ranked=False), Column("tau [95%]", kind="interval"),
        Column("expected", unit="x", ranked=False), Column("measured [IQR]", unit="x", kind="interval"),
        Column("same tokens", kind="count"), Column("drafter MiB", ",.2f", ranked=False),
        *(Column(name, form, ranked=False) for name, form in (("steps", ",d"), ("samples", ",d"), ("hours", ",.2f"))),
        Column("GPU-hours" if on_gpus else "rank-hours", ",.2f", ranked=False),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    unknown: dict[str, list[str]] = {}  # why there are dashes -> methods
    for e in members:
        rows.append((
            e.run, _method(e), e.requests, (e.tau, *e.tau_interval), e.expected_speedup,
            (e.DSR, *e.DSR_spread), (e.identical if e.exact else None, e.answers),
            None if e.memory is None else e.memory / MIB, e.steps, e.samples, e.hours,
            e.gpu_hours if on_gpus else e.rank_hours,
        ))  # fmt: skip
        for reason in e.unknown:
            unknown.setdefault(reason, []).append(f"{e.run}, {e.method}")
    footnotes = [f"Dashes of {'; '.join(dict.fromkeys(names))}: {reason}." for reason, names in unknown.items()]
    devices = {entry.device for entry in members}
    if len(devices) > 1:
        footnotes.append(f"Measured on {len(devices)} devices ({'; '.join(sorted(devices))}): speedups of different "
                         "devices cannot be compared.")  # fmt: skip
    return Table(title, columns, tuple(rows), note=note, compared=(), footnotes=tuple(footnotes))


def _method(cell: Cell | Entry) -> str:
    return f"{cell.method} (relaxed)" if cell.relaxed and "relaxed" not in cell.method else str(cell.method)


# Runs of one recipe that differ only in their seed


def over_seeds(runs: Sequence[Run]) -> list[Table]:
    """A table for each set of requests, temperature and number of new tokens of a recipe that has several seeds, of
    what all of its runs have measured.
    """
    alike: dict[tuple[tuple[str, str], ...], dict[int, Run]] = {}
    for run in runs:
        recipe = tuple(sorted((key, value) for key, value in run.settings.items() if key not in _FREE))
        alike.setdefault(recipe, {}).setdefault(int(run.settings.get("seed", _SEED)), run)
    columns = (
        text("method"), text("tau of each seed"), Column("tau [95%]", kind="interval"), text("measured in each run"),
        Column("measured [range]", unit="x", kind="interval"), Column("same tokens", kind="count"),
    )  # fmt: skip
    by_title: dict[str, dict[str, list[Cell]]] = {}  # title -> method -> its cell in each run
    counts = {}
    for by_seed in (by_seed for by_seed in alike.values() if len(by_seed) > 1):
        seeds = f"Over seeds {', '.join(map(str, sorted(by_seed)))}"
        for _, run in sorted(by_seed.items()):
            for stage, cell in ((stage, cell) for stage, each in run.evaluations.items() for cell in each):
                title = f"{seeds}: {_where(cell)}" + (f" (stage {stage})" if len(run.evaluations) > 1 else "")
                by_title.setdefault(title, {}).setdefault(cell.method, []).append(cell)
                counts[title] = len(by_seed)
    tables = []
    for title, by_method in by_title.items():
        rows = tuple(_spread(each) for each in by_method.values() if len(each) == counts[title])
        tables += [Table(title, columns, rows, note=SEEDS, compared=())] if rows else []
    return tables


def _spread(each: Sequence[Cell]) -> tuple:
    """The line of a method; a mean over some of the seeds is none over all."""
    taus, speeds = ([value for cell in each if (value := getattr(cell, name)) is not None] for name in ("tau", "DSR"))
    exact = [cell for cell in each if cell.exact]
    return (
        _method(next((cell for cell in each if cell.relaxed), each[0])),
        ", ".join("-" if cell.tau is None else f"{cell.tau:.2f}" for cell in each),
        student_interval(taus) if len(taus) == len(each) > 2 else None,
        ", ".join("-" if cell.DSR is None else f"{cell.DSR:.2f}x" for cell in each) if speeds else None,
        (statistics.fmean(speeds), min(speeds), max(speeds)) if len(speeds) == len(each) else None,
        (sum(c.identical for c in exact), sum(c.answers for c in exact)) if exact else None,
    )  # fmt: skip


# Runs side by side: settings that differ, training curves


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(key, its value in each run) of settings that are not the same in all; "-": not set.

    A stage that some run does not have is one line, with its kind.
    """
    written = [run.settings for run in runs if run.settings]
    keys = dict[str, None]()
    for key in (key for run in runs for key in run.settings):
        stage = ".".join(key.split(".")[:2])
        alone = stage.startswith("stages.") and not all(f"{stage}.kind" in settings for settings in written)
        keys[stage if alone else key] = None
    known = [({"seed": _SEED} if run.settings else {}) | run.settings for run in runs]
    rows = [(key, [settings.get(key, settings.get(f"{key}.kind", "-")) for settings in known]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1 and key != "output"]


def training_rows(runs: Sequence[Run]) -> list[list[str]]:
    """stage, metric, each run's value, as `SHOWN` has it."""
    rows = []
    for stage in dict.fromkeys(stage for run in runs for stage in run.curves):
        of_stage = [run.curves.get(stage, {}) for run in runs]
        last = [max((points[-1][0] for points in curves.values()), default=None) for curves in of_stage]
        rows.append([stage, "steps", *("-" if step is None else f"{step:,}" for step in last)])
        for metric, (label, chosen, form) in SHOWN.items():
            points = [[value for _, value in curves.get(metric, [])] for curves in of_stage]
            if any(points):
                rows.append([stage, label, *(f"{chosen(values):{form}}" if values else "-" for values in points)])
    return rows


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """The leaderboard, runs over their seeds, then settings that differ and training with a column for each
    run; those that have lines.
    """
    names, settings = [text(run.name) for run in runs], tuple((key, *values) for key, values in differences(runs))
    each = [
        *boards(entries(runs)), *over_seeds(runs),
        Table("Settings that differ", (text("setting"), *names), settings),
        Table("Training", (text("stage"), text("metric"), *names), tuple(map(tuple, training_rows(runs)))),
    ]  # fmt: skip
    return [table for table in each if table.rows]


def title(runs: Sequence[Run]) -> str:
    """Return the title of the page, the same in Markdown and HTML."""
    return f"Runs side by side: {', '.join(run.name for run in runs)}"


def markdown(runs: Sequence[Run], shown: Sequence[Table]) -> str:
    """The page of some tables."""
    lines = [line for table in shown for line in table_markdown(table)]
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
                groups.append((f"{stage}: {metric}", lines))
    return groups
