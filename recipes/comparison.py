"""Runs compared: a leaderboard of all methods, runs of one recipe over its seeds, and runs side by side.

Methods are compared where they measured the same thing: one table for each target, set of requests, temperature and
number of new tokens. What a run's folder does not say is a dash, with its reason below the table. A claim about a
method needs more than one training: runs that differ only in their seed get a row for each method with its spread.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from ..core.errors import UserError
from ..core.json_types import JsonMapping, JsonObject
from ..core.markdown import plain
from ..core.pretrained import reading_safetensors
from ..core.results import DONE, read_mark
from ..core.tracking import unit
from ..eval.intervals import student_half_width
from ..eval.run_folders import Run
from ..eval.run_tables import Cell
from ..eval.tables import Column, Table, interval, text, words
from ..eval.tables import markdown as table_markdown
from ..trainers.publish.lineage import trained_by
from .schema import Recipe

# Of a stage's numbers, those that the table shows, and which end of them is the good one.
BEST = {"val_loss": min, "val_accuracy": max, "val_top1": max, "tau": max, "tau_T0": max, "tau_T1": max}
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
MIB, OWN_TARGET = 2**20, "trained in this run"
_SEED = str(Recipe.model_fields["seed"].default)  # of a recipe that names none: `recipe.yaml` does not write it down
_FREE = ("seed", "output")  # what may differ between runs of one recipe
LEADERBOARD = (
    "Exact methods come first, the fastest at the top; relaxed ones follow. "
    "tau: tokens for each pass of the target, bonus token included, with its 95% interval; plain decoding has 1. "
    "Expected: the speedup of decoding that tau and the measured cost of a cycle promise. Measured: against plain "
    "decoding of the same target in the same run, with the quartiles over requests. Memory: parameters of the drafter "
    "times the bytes of their dtype, without the target's tables that a head shares. Training: optimizer steps, "
    "samples and wall time of the stages that trained the drafter, of their last start, and that time multiplied by "
    "the GPUs that all ranks held (GPU-hours; where nothing was trained on a GPU, by the ranks: rank-hours); answers "
    "and states that other stages prepared are not counted."
)
SEEDS = (
    "tau: its mean over the seeds, with Student's 95% interval, which two seeds do not give. Measured: the mean over "
    "the seeds of the speedup of decoding, with the lowest and the highest. Each run trained everything anew from its "
    "seed."
)
EVALUATION = (
    "tau: tokens emitted after the prefill over verification passes, bonus token included, with its 95% interval; "
    "then the measured speedup of decoding. Each speedup holds at the tau before it; those of runs on different "
    "machines cannot be compared."
)

# The leaderboard: each method's results, its drafter's memory, and the cost of its training


@dataclass(frozen=True)
class Entry:
    """A method of a run on one set of requests; None: not known, and `unknown` says why."""

    run: str
    stage: str
    target: str
    device: str
    cell: Cell
    parameters: int | None = None
    memory: int | None = None  # bytes
    steps: int | None = None
    samples: int | None = None
    hours: float | None = None
    gpu_hours: float | None = None  # 0: on CPUs
    rank_hours: float | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)  # column -> why there is a dash


class _Unknown(Exception):
    """A number that the folder of the run does not tell; its text is the reason."""


def entries(runs: Sequence[Run]) -> list[Entry]:
    """Return an entry of every evaluation of every run, in their order."""
    return [_entry(run, stage, cell) for run in runs for stage, each in run.evaluations.items() for cell in each]


def _entry(run: Run, stage: str, cell: Cell) -> Entry:
    about, unknown, values = run.about.get(stage, {}), dict[str, str](), JsonObject()
    for column, find in (("memory", _memory), ("training", _training)):
        try:
            if not cell.drafters:
                raise _Unknown("its drafter is the target, or has no weights of its own")
            for name in cell.drafters:
                if name not in run.stages or not (run.folder / name).is_dir():
                    raise _Unknown(f"{name} is no stage of this run: it was trained elsewhere")
            values |= find(run, cell.drafters)
        except _Unknown as reason:
            unknown[column] = str(reason)
    if (unrecorded := values.pop("unrecorded", None)) is not None:
        unknown["GPU-hours"] = f"stage {unrecorded} was trained by an earlier version, which did not record its ranks"
    if cell.tau is None:
        unknown["tau"] = "no cycle was run: every answer ended with its first token"
    elif cell.expected is None:
        unknown["expected"] = "its report is of an earlier version"
    if cell.speedup is not None and not math.isfinite(cell.speedup):
        unknown["measured"] = "its times are not finite"
    device = str(about.get("device") or "not said")
    return Entry(run.name, stage, _target(run, about), device, cell, **values, unknown=unknown)


def _target(run: Run, about: JsonMapping) -> str:
    """The target's name; of one that its run trained the hash of its weights, since two runs train two targets."""
    name = str(about.get("target") or "not said")
    if name != OWN_TARGET:
        return name
    trained = [n for n, stage in run.stages.items() if stage.get("kind") == "train" and stage.get("model") == "target"]
    mark = read_mark(run.folder / trained[-1] / DONE) if trained else None
    files = (mark.files or {}) if mark is not None else {}
    weights = sorted(name for name in files if Path(name).match("model*.safetensors"))
    return f"of weights {files[weights[0]].xxh3[:8]}" if weights else f"trained in {run.name}"


def _memory(run: Run, drafters: Sequence[str]) -> dict[str, int]:
    """Parameters and bytes of the drafters' files, by their headers."""
    parameters = memory = 0
    for name in drafters:
        files = sorted((run.folder / name).glob("model*.safetensors"))
        if not files:
            raise _Unknown(f"stage {name} has left no model.safetensors")
        for path in files:
            with reading_safetensors(path), safe_open(path, "pt") as file:
                for tensor in map(file.get_slice, file.keys()):
                    count = math.prod(tensor.get_shape())
                    parameters, memory = parameters + count, memory + count * _BYTES.get(tensor.get_dtype(), 1)
    return {"parameters": parameters, "memory": memory}


def _training(run: Run, drafters: Sequence[str]) -> JsonObject:
    """Steps, samples and hours of all stages that trained them; `unrecorded`: one that did not record its ranks."""
    steps = samples = 0
    hours: float | None = 0.0
    unrecorded, gpu_hours, rank_hours = None, 0.0, 0.0
    # A stage that two members of an ensemble began with counts once.
    for name in dict.fromkeys(stage for drafter in drafters for stage in _ancestors(run.stages, drafter)):
        points = [step for values in run.curves.get(name, {}).values() for step, _ in values]
        batch_size = run.stages[name].get("batch_size")
        if not points or not isinstance(batch_size, int):
            raise _Unknown(f"stage {name} has left no metrics.jsonl, or its recipe names no batch size")
        steps, samples = steps + max(points), samples + max(points) * batch_size
        done = read_mark(run.folder / name / DONE)
        own = None if done is None or done.seconds is None else done.seconds / 3600
        hours = None if hours is None or own is None else hours + own
        if done is None or own is None or done.ranks is None or done.gpus is None:
            unrecorded = unrecorded or name
            continue
        gpu_hours, rank_hours = gpu_hours + own * done.gpus, rank_hours + own * done.ranks
    values = {"steps": steps, "samples": samples, "hours": hours, "unrecorded": unrecorded}
    return values if unrecorded else values | {"gpu_hours": gpu_hours, "rank_hours": rank_hours}


def _ancestors(stages: JsonMapping, name: str) -> list[str]:
    try:
        return trained_by(stages, name)
    except (KeyError, ValueError, AttributeError) as error:
        raise _Unknown(f"its recipe.yaml does not say how stage {name} was trained") from error


def boards(found: Sequence[Entry]) -> list[Table]:
    """A table for each target, set of requests, temperature and length, the fastest exact method first."""
    groups: dict[tuple[str, str, float, int], list[Entry]] = {}
    for e in found:
        groups.setdefault((e.target, e.cell.requests_of, e.cell.temperature, e.cell.max_new_tokens), []).append(e)
    return [_board(group, members, LEADERBOARD if not n else "") for n, (group, members) in enumerate(groups.items())]


def _board(group: tuple[str, str, float, int], members: Sequence[Entry], note: str) -> Table:
    target, where, temperature, length = group
    members = sorted(members, key=lambda e: (e.cell.relaxed, -(e.cell.speedup or 0)))
    on_gpus = any(entry.gpu_hours for entry in members)
    columns = (
        text("run"), text("method"), Column("n", "d", ranked=False), Column("tau [95%]", kind="interval"),
        Column("expected", unit="x", ranked=False), Column("measured [IQR]", unit="x", kind="interval"),
        Column("same tokens", kind="count"), Column("drafter MiB", ",.2f", ranked=False),
        *(Column(name, form, ranked=False) for name, form in (("steps", ",d"), ("samples", ",d"), ("hours", ",.2f"))),
        Column("GPU-hours" if on_gpus else "rank-hours", ",.2f", ranked=False),
    )  # fmt: skip
    rows = []
    about: dict[tuple[str, str], list[str]] = {}  # (why there is a dash, column) -> methods
    for e in members:
        c = e.cell
        speed = None if c.speedup is None or "measured" in e.unknown else c.speedup
        rows.append((
            e.run, _method(c.method, c.relaxed), c.requests,
            None if c.tau is None else (c.tau, *(c.interval or (c.tau, c.tau))), c.expected,
            None if speed is None else (speed, *(c.quartiles or (speed, speed))),
            None if c.identical is None else (c.identical, c.answers), None if e.memory is None else e.memory / MIB,
            e.steps, e.samples, e.hours, e.gpu_hours if on_gpus else e.rank_hours,
        ))  # fmt: skip
        for column, reason in e.unknown.items():
            about.setdefault((reason, column), []).append(f"{e.run}, {c.method}")
    footnotes = [f"No {column} ({'; '.join(dict.fromkeys(names))}): {reason}."
                 for (reason, column), names in about.items()]  # fmt: skip
    devices = {entry.device for entry in members}
    if len(devices) > 1:
        footnotes.append(f"Measured on {len(devices)} devices ({'; '.join(sorted(devices))}): speedups of different "
                         "devices cannot be compared.")  # fmt: skip
    title = f"Leaderboard: {where}, T {temperature:g}, {length} new tokens, target {target}"
    return Table(title, columns, tuple(rows), note=note, compared=(), footnotes=tuple(footnotes))


def _method(name: str, relaxed: bool) -> str:
    return f"{name} (relaxed)" if relaxed and "relaxed" not in name else name


HEAD = (
    "run", "stage", "target", "device", "measured_on", "temperature", "max_new_tokens", "method", "relaxed", "drafters",
    "requests", "tau", "tau_low", "tau_high", "expected_speedup", "measured_speedup", "measured_quartile_1",
    "measured_quartile_3", "end_to_end_speedup", "identical", "drafter_parameters", "drafter_bytes", "training_steps",
    "training_samples", "training_hours", "training_gpu_hours", "training_rank_hours", "unknown",
)  # fmt: skip


def as_csv(found: Sequence[Entry]) -> str:
    """All entries under one head; numbers as they were measured, empty where they are not known."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(HEAD)
    for e in found:
        c = e.cell
        unknown = "; ".join(f"{column}: {reason}" for column, reason in e.unknown.items())
        row = (e.run, e.stage, e.target, e.device, c.requests_of, c.temperature, c.max_new_tokens, c.method, c.relaxed,
               ", ".join(c.drafters), c.requests, c.tau, *(c.interval or (None, None)), c.expected, c.speedup,
               *(c.quartiles or (None, None)), c.end_to_end, c.identical, e.parameters, e.memory, e.steps, e.samples,
               e.hours, e.gpu_hours, e.rank_hours, unknown)  # fmt: skip
        writer.writerow([_harmless(value) for value in row])
    return written.getvalue()


def _harmless(value: object) -> object:
    """A text that a spreadsheet would take for a formula, with a quote before it: names may be a stranger's."""
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value


# Runs of one recipe that differ only in their seed


def over_seeds(runs: Sequence[Run]) -> list[Table]:
    """A table for each set of requests, temperature and number of new tokens of a recipe that has several seeds."""
    alike: dict[tuple[tuple[str, str], ...], dict[int, Run]] = {}
    for run in runs:
        recipe = tuple(sorted((key, value) for key, value in run.settings.items() if key not in _FREE))
        seed = int(run.settings.get("seed", _SEED))
        alike.setdefault(recipe, {}).setdefault(seed, run)
    return [table for by_seed in alike.values() if len(by_seed) > 1 for table in _of_recipe(by_seed)]


def _of_recipe(by_seed: Mapping[int, Run]) -> Iterator[Table]:
    """Its tables, of what all of its runs have measured."""
    found: dict[str, dict[str, list[Cell]]] = {}  # where -> method -> its cell in each run
    for seed in sorted(by_seed):
        run = by_seed[seed]
        for stage, measured in run.evaluations.items():
            of = f" (stage {stage})" if len(run.evaluations) > 1 else ""
            for cell in measured:
                where = f"{cell.requests_of}, T {cell.temperature:g}, {cell.max_new_tokens} new tokens{of}"
                found.setdefault(where, {}).setdefault(cell.method, []).append(cell)
    columns = (
        text("method"), text("tau of each seed"), Column("tau [95%]", kind="interval"), text("measured in each run"),
        Column("measured [range]", unit="x", kind="interval"), Column("same tokens", kind="count"),
    )  # fmt: skip
    for where, by_method in found.items():
        rows = tuple(_spread(method, each) for method, each in by_method.items() if len(each) == len(by_seed))
        if rows:
            title = f"Over seeds {', '.join(map(str, sorted(by_seed)))}: {where}"
            yield Table(title, columns, rows, note=SEEDS, compared=())


def _spread(method: str, each: Sequence[Cell]) -> tuple:
    taus = [cell.tau for cell in each if cell.tau is not None]
    is_whole = len(taus) == len(each)  # a mean over some of the seeds is none over all
    mean = statistics.fmean(taus) if is_whole else 0.0
    half = student_half_width(statistics.stdev(taus), len(taus)) if is_whole else 0.0
    speeds = [cell.speedup for cell in each if cell.speedup is not None]
    exact = [cell for cell in each if cell.identical is not None]
    return (
        _method(method, any(cell.relaxed for cell in each)),
        ", ".join("-" if cell.tau is None else f"{cell.tau:.2f}" for cell in each),
        (mean, mean - half, mean + half) if is_whole and len(taus) > 2 else None,
        ", ".join("-" if cell.speedup is None else f"{cell.speedup:.2f}x" for cell in each) if speeds else None,
        (statistics.fmean(speeds), min(speeds), max(speeds)) if len(speeds) == len(each) else None,
        (sum(c.identical or 0 for c in exact), sum(c.answers for c in exact)) if exact else None,
    )


# Runs side by side: settings that differ, training curves, evaluation tables


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(key, its value in each run) of settings that are not the same in all; "-": not set.

    A stage that some run does not have is one line, with its kind.
    """
    keys = list(dict.fromkeys(_short(key, runs) for run in runs for key in run.settings))
    known = [({"seed": _SEED} if run.settings else {}) | run.settings for run in runs]
    rows = [(key, [settings.get(key, settings.get(f"{key}.kind", "-")) for settings in known]) for key in keys]
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
            points = [[value for _, value in curves.get(metric, [])] for curves in of_stage]
            shown = [f"{BEST[metric](some) if metric in BEST else some[-1]:.4f}" if some else "-" for some in points]
            rows.append([stage, f"{metric} ({'best' if metric in BEST else 'last'})", *shown])
        if any("samples_per_s" in curves for curves in of_stage):
            speeds = [[v for _, v in curves.get("samples_per_s", [])] for curves in of_stage]
            rows.append([stage, "samples/s (median)", *(f"{statistics.median(s):,.1f}" if s else "-" for s in speeds)])
    return rows


def evaluation_rows(runs: Sequence[Run]) -> list[list[str]]:
    """stage, set, method, then tau with its interval and the speedup of each run; cells that any of them measured."""
    found: dict[tuple[str, str, str], dict[int, str]] = {}
    for index, run in enumerate(runs):
        for stage, measured in run.evaluations.items():
            for c in measured:
                spread = f" {interval(c.interval)}" if c.interval else ""
                speedup = f", {c.speedup:.2f}x" if c.speedup is not None else ""
                shown = "-" if c.tau is None else f"{c.tau:.2f}{spread}{speedup}"
                found.setdefault((stage, c.where, c.method), {})[index] = shown
    return [[*place, *(by_run.get(i, "-") for i in range(len(runs)))] for place, by_run in found.items()]


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """Settings that differ, training and evaluation, with a column for each run; those that have lines."""
    names, settings = [run.name for run in runs], [[key, *values] for key, values in differences(runs)]
    each = [
        words(["setting", *names], settings, title="Settings that differ"),
        words(["stage", "metric", *names], training_rows(runs), title="Training"),
        words(["stage", "measured on", "method", *names], evaluation_rows(runs), title="Evaluation", note=EVALUATION),
    ]
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
                groups.append((f"{stage}: {metric}" + (f" ({unit(metric)})" if unit(metric) else ""), lines))
    return groups


def as_data(runs: Sequence[Run]) -> JsonObject:
    """What the page says, for programs."""
    head: JsonMapping = {"runs": [run.name for run in runs], "settings": dict(differences(runs))}
    return {**head, "training": training_rows(runs), "evaluation": evaluation_rows(runs)}
