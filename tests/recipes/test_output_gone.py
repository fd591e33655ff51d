"""Output that nobody reads, or whose disk is full: a run trains on and its exit code is its own; lists just end."""

import errno
import io
import subprocess
import sys
from pathlib import Path

import pytest
from draftsmith.recipes.commands.output import Lasting
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


class Disk(io.StringIO):
    """One that is full at first."""

    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_full_disk_may_have_room_again():
    disk = Disk()
    out = Lasting(disk)
    assert out.write("left out") == 8
    disk.is_full = False
    out.write("written")
    assert disk.getvalue() == "written" and out.lost.errno == errno.ENOSPC


@pytest.mark.parametrize("stdout", ["both gone", pytest.param("full", marks=pytest.mark.slow)])
def test_a_run_goes_on_without_its_output(stdout, tmp_path):
    settings = ["stages=[world,seeing]", *(word for word in TINY_DATASET if not word.startswith("stages="))]
    code, said = ended(["recipe=demo/lvlm-from-nothing", f"output={tmp_path}/run", *settings], stdout, tmp_path)
    assert code == 0 and "Traceback" not in said and "ignored" not in said
    assert all((tmp_path / "run" / stage / "done.json").is_file() for stage in ("world", "seeing"))
