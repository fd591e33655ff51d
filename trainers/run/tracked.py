"""What a tracker gets beyond the numbers of training: a sample, an evaluation's tables and plots, the model.

All of it lies in the stage's folder already; here it is handed on, and the stage's tracker is closed however it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...core.errors import first_line
from ...core.files import read_json, read_text
from ...core.json_types import JsonObject
from ...core.secrets import redact
from ...core.tracking import Tracker
from ...eval.run_reports import COLUMNS, cells, readable
from .context import Context

_AGAIN = "run the stage again (restart=STAGE)"

SAMPLE = "sample.txt"
# Of a stage's folder: what makes up the model, and what a reader of the report wants.
RESULT, REPORT = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"), ("*.md", "*.html", "*.json", "*.png")
NOT_RESULT = ("done.json", "fingerprint.json", "score.json", SAMPLE)


@contextmanager
def tracked(context: Context) -> Iterator[Context]:
    """A stage's context; afterwards trackers get what the stage has left."""
    failed = True
    try:
        yield context
        failed = False
        if context.tracking.wandb is not None:
            try:
                _hand_on(context)
            except Exception as error:  # the stage has its results: a tracker is not worth them
                context.say(f"tracking failed, and the run continues without it: {redact(first_line(error))}")
    finally:
        for tracker in context.trackers:
            tracker.finish(int(failed))


def track_sample(tracker: Tracker, folder: Path) -> None:
    """The rendered sample that was looked at before step 0, where there is one."""
    path = folder / SAMPLE
    if path.is_file():
        tracker.table("sample", ["supervised text in [[ ]]"], [[read_text(path, hint=_AGAIN)]])


def _hand_on(context: Context) -> None:
    report = context.folder / "report.json"
    if report.is_file():
        tracker = context.tracker()
        if rows := cells(read_json(report, JsonObject, hint=_AGAIN)):
            tracker.table("report", COLUMNS, [readable(row) for row in rows])
        tracker.pictures(sorted(context.folder.glob("*.png")))
        tracker.artifact("report", _files(context.folder, REPORT, ("done.json", "fingerprint.json")), None)
    elif (context.folder / "model.safetensors").is_file():
        context.tracker().artifact("result", _files(context.folder, RESULT, NOT_RESULT), None)


def _files(folder: Path, patterns: tuple[str, ...], without: tuple[str, ...]) -> list[Path]:
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in paths if path.name not in without)
