"""Output that nobody reads, or whose disk is full: a run trains on and its exit code is its own; lists just end."""

import errno
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from draftsmith.recipes.commands.cli import Lasting, main
from stages_run import TINY_DATASET

FULL = Path("/dev/full")
COMMAND = [sys.executable, "-m", "draftsmith"]


def ended(words: list[str], stdout: str, cwd: Path) -> tuple[int, str]:
    """Exit code and stderr of a command whose reader leaves after one line, or whose output's disk is full."""
    if stdout == "full":
        with FULL.open("w") as out:
            done = subprocess.run(
                [*COMMAND, *words], stdout=out, stderr=subprocess.PIPE, cwd=cwd, text=True, check=False
            )
        return done.returncode, done.stderr
    errors = subprocess.STDOUT if stdout == "both gone" else subprocess.PIPE
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=errors, cwd=cwd, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read() if process.stderr else ""
    return process.returncode, said


def test_a_full_disk_may_have_room_again():
    disk = Mock(**{"write.side_effect": [OSError(errno.ENOSPC, "full"), 7]})
    out = Lasting(disk)
    assert (out.write("left out"), out.write("written")) == (8, 7) and out.lost.errno == errno.ENOSPC
    disk.fileno.assert_not_called()


@pytest.mark.parametrize("stdout", ["both gone", pytest.param("full", marks=pytest.mark.slow)])
def test_a_run_goes_on_without_its_output(stdout, tmp_path):
    settings = ["stages=[world,seeing]", *(word for word in TINY_DATASET if not word.startswith("stages="))]
    code, said = ended(["recipe=demo/lvlm-from-nothing", f"output={tmp_path}/run", *settings], stdout, tmp_path)
    assert code == 0 and "Traceback" not in said and "ignored" not in said
    assert all((tmp_path / "run" / stage / "done.json").is_file() for stage in ("world", "seeing"))


def test_what_only_prints_ends_with_its_reader(tmp_path):
    for words in (["--help"], ["show", "demo/lvlm"]):
        assert ended(words, "gone", tmp_path) == (0, ""), words


def test_output_that_was_closed_before_the_start(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after `>&-`
    assert main(["--version"]) == 0


def test_the_longer_name_of_the_command_runs_it():
    done = subprocess.run([sys.executable, "-m", "draftsmith.recipes.commands.cli", "--version"], capture_output=True)
    assert done.returncode == 0 and b"Traceback" not in done.stderr
