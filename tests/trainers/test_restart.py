"""The record of restarts: one entry for each command, completed after a kill, and gone once another command has set
aside what it restarted."""

import json
import os
from pathlib import Path

import pytest
from draftsmith.trainers.run import restart
from draftsmith.trainers.run.stage import Planned

PLAN = [Planned("note", None, {}, "f", None)]
MINE, OTHERS = (restart.command_identity(PLAN, "note", ["restart=note", seed]) for seed in ("seed=1", "seed=2"))


@pytest.fixture
def output(tmp_path) -> Path:
    make(tmp_path)
    return tmp_path


def make(output: Path) -> None:
    for name in ("note", "second"):
        (output / name).mkdir(exist_ok=True)


def set_aside(output: Path, command: str, stage: str = "note", stale: tuple[str, ...] = ("note", "second")) -> None:
    restart.set_aside(output, command, stage, stale, lambda text: None)
    make(output)


def stages(output: Path, *commands: str) -> list[str | None]:
    """What each command has restarted, if anything."""
    return [None if (before := restart.recorded(output).get(c)) is None else before.stage for c in commands]


def test_a_command_goes_on_though_another_one_has_restarted_another_stage(output):
    assert stages(output, MINE, OTHERS) == [None, None]
    set_aside(output, MINE)
    assert stages(output, MINE, OTHERS) == ["note", None]
    set_aside(output, OTHERS, "second", ("second",))
    assert stages(output, MINE, OTHERS) == ["note", "second"]


def test_the_record_says_what_moves_before_it_moves(output, monkeypatch):
    """A start that is killed in between is completed by the next one, which knows of it by the record alone."""
    real, seen = os.replace, []

    def moving(source, destination):
        if ".before-" in str(destination):
            seen.append(json.loads((output / restart.RECORD).read_text())["restarts"][MINE]["moved"])
        real(source, destination)

    monkeypatch.setattr(restart.os, "replace", moving)
    set_aside(output, MINE)
    assert seen == [False, False]
    assert json.loads((output / restart.RECORD).read_text())["restarts"][MINE]["moved"]


def test_what_was_kept_is_never_moved_again(output):
    """Not by later starts, which complete what was cut off, and not where both folders are there."""
    set_aside(output, MINE)
    restart.complete(output)
    names = ["note", "note.before-1", "second", "second.before-1"]
    assert sorted(path.name for path in output.iterdir() if path.is_dir()) == names
    record = output / restart.RECORD
    record.write_text(record.read_text().replace('"moved": true', '"moved": false'))
    (output / "note.before-1").rename(output / "elsewhere")  # a start that was killed before it moved this one
    restart.complete(output)
    names = ["elsewhere", "note.before-1", "second", "second.before-1"]
    assert sorted(path.name for path in output.iterdir() if path.is_dir()) == names
