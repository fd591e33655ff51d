"""The record of restarts: one entry for each command, completed after a kill, and begun anew once all has finished."""

from pathlib import Path

import pytest
from draftsmith.trainers import restart

MINE, OTHERS = (restart.command_identity(["restart=note", seed], {"note": "f"}) for seed in ("seed=1", "seed=2"))


@pytest.fixture
def output(tmp_path, monkeypatch) -> Path:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    make(tmp_path)
    return tmp_path


def make(output: Path) -> None:
    for name in ("note", "second"):
        (output / name).mkdir(exist_ok=True)


def set_aside(output: Path, command: str) -> None:
    restart.set_aside(output, command, "note", ["note", "second"], lambda text: None)
    make(output)


def test_a_command_goes_on_though_another_one_has_restarted_since(output):
    for command in (MINE, OTHERS):
        assert restart.is_to_come(output, command, ["note"])
        set_aside(output, command)
    for command in (MINE, OTHERS):
        assert not restart.is_to_come(output, command, ["note"]), "what it began is unfinished"
        assert restart.is_to_come(output, command, [])


def test_in_one_job_of_a_scheduler_a_command_may_restart_again(output, monkeypatch):
    """An allocation that somebody types into is never requeued; one that is says how often, from 1 on."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    set_aside(output, MINE)
    for count, is_to_come in {None: True, "": True, "0": True, "1": False, "2": False}.items():
        if count is not None:
            monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        assert restart.is_to_come(output, MINE, []) == is_to_come, count
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    assert restart.is_to_come(output, MINE, [])


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
