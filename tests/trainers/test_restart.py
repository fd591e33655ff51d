"""The record of restarts: one entry for each command, which is gone once another command has set aside what it
restarted."""

import os
from pathlib import Path

import pytest
from draftsmith.trainers.run import restart
from draftsmith.trainers.run.stage import Planned
from fails import fails_with

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
    return [restart.recorded(output).get(command, (None,))[0] for command in commands]


def test_a_command_goes_on_though_another_one_has_restarted_another_stage(output):
    assert stages(output, MINE, OTHERS) == [None, None]
    set_aside(output, MINE)
    assert stages(output, MINE, OTHERS) == ["note", None]
    set_aside(output, OTHERS, "second", ("second",))
    assert stages(output, MINE, OTHERS) == ["note", "second"]


def test_a_start_that_is_killed_while_it_moves_is_done_again_by_the_next_one(output, monkeypatch):
    """It is not in the record, and the stage itself moves last: until then its results stand."""
    real = os.replace

    def killed(source, destination):
        if Path(source).name == "note":
            raise KeyboardInterrupt
        real(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(restart.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            restart.set_aside(output, MINE, "note", ("note", "second"), lambda text: None)
    assert folders(output) == ["note", "second.before-1"] and stages(output, MINE) == [None]
    restart.set_aside(output, MINE, "note", ("note", "second"), lambda text: None)
    assert folders(output) == ["note.before-1", "second.before-1"] and stages(output, MINE) == ["note"]


def test_what_was_kept_is_never_moved_again(output):
    set_aside(output, MINE)
    set_aside(output, OTHERS)
    assert folders(output) == [
        f"{name}{kept}" for name in ("note", "second") for kept in ("", ".before-1", ".before-2")
    ]


def test_the_record_of_an_earlier_version_is_refused_by_name(output):
    (output / restart.RECORD).write_text('{"restarts": {"of before": {"stage": "note", "kept": {}, "moved": true}}}')
    caught = fails_with("restarts", restart.recorded, output)
    assert restart.RECORD in str(caught) and "an earlier version may have written it; delete it" in str(caught)


def folders(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir() if path.is_dir())
