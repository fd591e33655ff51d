"""A leaderboard of runs: each method's results, its drafter's memory, and the cost of its training.

Methods are compared where they measured the same thing: one table for each target, set of requests, temperature and
number of new tokens. What a run's folder does not say is a dash, with its reason below the table.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..core.files import read_yaml
from ..core.pretrained import reading_safetensors
from ..core.results import DONE, read_mark
from ..eval.run_tables import Cell
from ..eval.side_by_side import Run
from ..eval.tables import Column, Table, text
from ..trainers.publishing.lineage import trained_by

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
MIB, OWN_TARGET = 2**20, "trained in this run"
NOTE = (
    "Exact methods come first, the fastest at the top; relaxed ones follow. "
    "tau: tokens for each pass of the target, bonus token included, with its 95% interval; plain decoding has 1. "
    "Expected: the speedup of decoding that tau and the measured cost of a cycle promise. Measured: against plain "
    "decoding of the same target in the same run, with the quartiles over requests. Memory: parameters of the drafter "
    "times the bytes of their dtype, without the target's tables that a head shares. Training: optimizer steps, "
    "samples and wall time of the stages that trained the drafter, of their last start, and that time multiplied by "
    "the GPUs that all ranks held (GPU-hours; where nothing was trained on a GPU, by the ranks: rank-hours); answers "
    "and states that other stages prepared are not counted."
)


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

    @property
    def group(self) -> tuple[str, str, float, int]:
        """What entries must have in common to be compared."""
        return self.target, self.cell.requests_of, self.cell.temperature, self.cell.max_new_tokens


def entries(runs: Sequence[Run]) -> list[Entry]:
    """Of every evaluation of every run, in their order."""
    return [
        _entry(run, stage, cell, _stages(run))
        for run in runs
        for stage, cells in run.evaluations.items()
        for cell in cells
    ]


def _entry(run: Run, stage: str, cell: Cell, stages: Mapping[str, Any]) -> Entry:
    about, unknown = run.about.get(stage, {}), {}
    values: dict[str, Any] = {}
    for column, find in (("memory", _memory), ("training", _training)):
        try:
            values |= find(run, cell, stages)
        except _Unknown as reason:
            unknown[column] = str(reason)
    if "training" not in unknown and (stage := values.pop("unrecorded")) is not None:
        unknown["GPU-hours"] = f"stage {stage} was trained by an earlier version, which did not record its ranks"
    if cell.tau is None:
        unknown["tau"] = "no cycle was run: every answer ended with its first token"
    elif cell.expected is None:
        unknown["expected"] = "its report is of an earlier version"
    if cell.speedup is not None and not math.isfinite(cell.speedup):
        unknown["measured"] = "its times are not finite"
    return Entry(
        run.name,
        stage,
        _target(run, about, stages),
        str(about.get("device") or "not said"),
        cell,
        **values,
        unknown=unknown,
    )


def _target(run: Run, about: Mapping[str, Any], stages: Mapping[str, Any]) -> str:
    """The target's name; of one that its run trained the hash of its weights, since two runs train two targets."""
    name = str(about.get("target") or "not said")
    if name != OWN_TARGET:
        return name
    trained = [n for n, stage in stages.items() if stage.get("kind") == "train" and stage.get("model") == "target"]
    mark = read_mark(run.folder / trained[-1] / DONE) if trained else None
    files = (mark.files or {}) if mark is not None else {}
    weights = sorted(name for name in files if Path(name).match("model*.safetensors"))
    return f"of weights {files[weights[0]].xxh3[:8]}" if weights else f"trained in {run.name}"


class _Unknown(Exception):
    """A number that the folder of the run does not tell; its text is the reason."""


def _stages(run: Run) -> Mapping[str, Any]:
    path = run.folder / "recipe.yaml"
    if not path.is_file():
        return {}
    tree = read_yaml(path, dict[str, Any], hint="restore the file, or run the recipe's command again")
    stages = tree.get("stages")
    return stages if isinstance(stages, dict) else {}


def _trained_here(run: Run, cell: Cell, stages: Mapping[str, Any]) -> tuple[str, ...]:
    """The drafters' stages, each of which has a folder in the run."""
    if not cell.drafters:
        raise _Unknown("its drafter is the target, or has no weights of its own")
    for name in cell.drafters:
        if name not in stages or not (run.folder / name).is_dir():
            raise _Unknown(f"{name} is no stage of this run: it was trained elsewhere")
    return cell.drafters


def _memory(run: Run, cell: Cell, stages: Mapping[str, Any]) -> dict[str, int]:
    parameters = memory = 0
    for name in _trained_here(run, cell, stages):
        files = sorted((run.folder / name).glob("model*.safetensors"))
        if not files:
            raise _Unknown(f"stage {name} has left no model.safetensors")
        for path in files:
            count, size = _weighed(path)
            parameters, memory = parameters + count, memory + size
    return {"parameters": parameters, "memory": memory}


def _weighed(path: Path) -> tuple[int, int]:
    """(parameters, bytes) of a file, by its header."""
    with reading_safetensors(path), safe_open(path, "pt") as file:
        slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
        counts = [(math.prod(part.get_shape()), _BYTES.get(part.get_dtype(), 1)) for part in slices]
    return sum(count for count, _ in counts), sum(count * size for count, size in counts)


def _training(run: Run, cell: Cell, stages: Mapping[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys(
        stage for name in _trained_here(run, cell, stages) for stage in _ancestors(stages, name)
    )  # a stage that two members of an ensemble began with counts once
    steps = samples = 0
    hours: float | None = 0.0
    unrecorded, gpu_hours, rank_hours = None, 0.0, 0.0
    for name in names:
        points = [step for values in run.curves.get(name, {}).values() for step, _ in values]
        batch_size = stages[name].get("batch_size")
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


def _ancestors(stages: Mapping[str, Any], name: str) -> list[str]:
    try:
        return trained_by(stages, name)
    except (KeyError, ValueError, AttributeError) as error:
        raise _Unknown(f"its recipe.yaml does not say how stage {name} was trained") from error


def boards(found: Sequence[Entry]) -> list[Table]:
    """A table for each group, the fastest exact method first."""
    groups: dict[tuple[str, str, float, int], list[Entry]] = {}
    for entry in found:
        groups.setdefault(entry.group, []).append(entry)
    return [_board(group, members, NOTE if not n else "") for n, (group, members) in enumerate(groups.items())]


def _board(group: tuple[str, str, float, int], members: Sequence[Entry], note: str) -> Table:
    target, where, temperature, length = group
    members = sorted(members, key=lambda e: (e.cell.relaxed, -(e.cell.speedup or 0)))
    on_gpus = any(entry.gpu_hours for entry in members)
    columns = (
        text("run"), text("method"), Column("n", "d", ranked=False), Column("tau [95%]", kind="interval"),
        Column("expected", unit="x"), Column("measured [IQR]", unit="x", kind="interval"),
        Column("same tokens", kind="count"), Column("drafter MiB", ",.2f", ranked=False),
        *(Column(name, form, ranked=False) for name, form in (("steps", ",d"), ("samples", ",d"), ("hours", ",.2f"))),
        Column("GPU-hours" if on_gpus else "rank-hours", ",.2f", ranked=False),
    )  # fmt: skip
    devices = {entry.device for entry in members}
    footnotes = _reasons(members)
    if len(devices) > 1:
        footnotes.append(f"Measured on {len(devices)} devices ({'; '.join(sorted(devices))}): speedups of different "
                         "devices cannot be compared.")  # fmt: skip
    rows = tuple((*_row(entry), entry.gpu_hours if on_gpus else entry.rank_hours) for entry in members)
    title = f"Leaderboard: {where}, T {temperature:g}, {length} new tokens, target {target}"
    return Table(title, columns, rows, note=note, compared=(), footnotes=tuple(footnotes))


def _row(entry: Entry) -> tuple[Any, ...]:
    cell = entry.cell
    speed = None if cell.speedup is None or "measured" in entry.unknown else cell.speedup
    tau = None if cell.tau is None else (cell.tau, *(cell.interval or (cell.tau, cell.tau)))
    spread = None if speed is None else (speed, *(cell.quartiles or (speed, speed)))
    same = None if cell.identical is None else (cell.identical, cell.requests)
    memory = None if entry.memory is None else entry.memory / MIB
    method = f"{cell.method} (relaxed)" if cell.relaxed and "relaxed" not in cell.method else cell.method
    return (entry.run, method, cell.requests, tau, cell.expected, spread, same, memory, entry.steps,
            entry.samples, entry.hours)  # fmt: skip


def _reasons(members: Sequence[Entry]) -> list[str]:
    """Why there are dashes: a line for each reason, with the methods that it is about."""
    about: dict[tuple[str, str], list[str]] = {}
    for entry in members:
        for column, reason in entry.unknown.items():
            about.setdefault((reason, column), []).append(f"{entry.run}, {entry.cell.method}")
    return [f"No {column} ({'; '.join(dict.fromkeys(names))}): {reason}." for (reason, column), names in about.items()]


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


def _harmless(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula, with a quote before it: names may be a stranger's."""
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value
