"""Ranks end with their launchers, also with those that have ended before the ranks could look."""

import errno
import os
import subprocess
import sys

import pytest
from draftsmith.core.errors import UserError
from draftsmith.trainers.guard import RunLock

RANK = """
import os, sys, time
while "orphan" in sys.argv and os.getppid() == int(os.environ["STARTED_BY"]):
    time.sleep(0.01)
from draftsmith.trainers import guard
pairs = guard._launchers()
print("gone" if pairs is None else len(pairs), flush=True)
"""
LAUNCHER = """
import os, subprocess, sys
os.environ["STARTED_BY"] = str(os.getpid())
rank = subprocess.Popen([sys.executable, "-c", {rank!r}, *sys.argv[2:]])
if "orphan" not in sys.argv:
    rank.wait()
"""
RUNNER = "import subprocess, sys; subprocess.run(sys.argv[2:])"


def asked(*words: str, runner: bool = False, name: str = "deepspeed.launcher.launch") -> str:
    """What a rank finds above it. Name and options of the launcher are words of its command, as of the real one.

    The launcher of an orphan ends as soon as it has started its rank.
    """
    command = [sys.executable, "-c", LAUNCHER.format(rank=RANK), name, *words]
    if runner:
        command = [sys.executable, "-c", RUNNER, "deepspeed.launcher.runner", *command]
    environment = os.environ | {"CROSS_RANK": "0"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=60, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("found", "words", "settings"),
    [
        ("2", ["--local_rank=0"], {"runner": True}),
        ("gone", ["--local_rank=0"], {}),  # the runner was killed before the launcher had started its ranks
        ("1", ["--node_rank=1", "--local_rank=0"], {}),  # a shell on another node started the launcher
        ("gone", ["--local_rank=0", "orphan"], {}),  # the launcher was killed while the rank imported
        ("1", [], {"name": "torchrun"}),
        ("0", [], {"name": "a program that runs draftsmith"}),
        ("0", ["orphan"], {"name": "a shell that ended, as under nohup"}),
    ],
)
def test_what_a_rank_finds_above_it(found, words, settings):
    assert asked(*words, **settings) == found


def test_a_disk_that_is_full_when_the_lock_is_signed_is_told(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(UserError, match="bytes are there") as caught:
            RunLock(tmp_path, say=print)
    assert str(tmp_path) in str(caught.value) and "make room" in str(caught.value)
    RunLock(tmp_path, say=print).release()  # nobody holds it
