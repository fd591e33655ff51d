"""transformers in a serving engine's place: the worker of tests/trainers/engines/workers, in this Python."""

import sys
from pathlib import Path

from draftsmith.trainers.engines import opened, process

WORKERS = Path(__file__).parent / "engines" / "workers"


def in_place(monkeypatch) -> None:
    monkeypatch.setattr(process, "_WORKERS", WORKERS)
    monkeypatch.setattr(opened, "find_python", lambda asked, engine, key: sys.executable)
    monkeypatch.setattr(opened, "version_of", lambda package, python: "1.0")
