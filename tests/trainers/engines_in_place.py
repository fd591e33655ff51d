"""transformers in a serving engine's place: the worker of tests/trainers/serve/workers, in this Python."""

import sys
from pathlib import Path

from draftsmith.trainers.evaluate import engine_run
from draftsmith.trainers.serve import engine_process as process
from draftsmith.trainers.serve import engine_section

WORKERS = Path(__file__).parent / "serve" / "workers"


def in_place(monkeypatch) -> None:
    monkeypatch.setattr(process, "_WORKERS", WORKERS)
    for module in (engine_section, engine_run):
        monkeypatch.setattr(module, "find_python", lambda python, key: sys.executable)
    for module in (engine_section, engine_run):
        monkeypatch.setattr(module, "version_of", lambda package, python: "1.0")
