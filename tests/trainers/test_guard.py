"""Ranks end with their launchers."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from draftsmith.trainers.run import guard
from draftsmith.trainers.run.guard import RunLock
from fails import fails_with, raising

RANK = """
from draftsmith.trainers.run import guard
print(len(guard._launchers()), flush=True)
"""
LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", {rank!r}, *sys.argv[2:]])
"""
RUNNER = "import json, os, subprocess; subprocess.run(json.loads(os.environ['LAUNCHER']))"


def asked(*words: str, runner: bool = False, name: str = "deepspeed.launcher.launch") -> str:
    """How many processes a rank finds above it that it ends with. Name and options of the launcher are words of its
    command, as of the real one. Who runs the tests is nobody's runner, whatever words its own command has.
    """
    command = [sys.executable, "-c", LAUNCHER.format(rank=RANK), name, *words]
    environment = os.environ | {"LAUNCHER": json.dumps(command)}
    above = [sys.executable, "-c", RUNNER, "deepspeed.launcher.runner" if runner else "a shell"]
    done = subprocess.run(above, stdout=subprocess.PIPE, text=True, env=environment, timeout=60, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(("found", "words", "settings"), [
    ("2", ["--local_rank=0"], {"runner": True}),
    ("1", ["--node_rank=1", "--local_rank=0"], {}),  # a shell on another node started the launcher
    ("1", [], {"name": "torchrun"}),
    ("0", [], {"name": "a program that runs draftsmith"}),
])  # fmt: skip
def test_what_a_rank_finds_above_it(found, words, settings):
    assert asked(*words, **settings) == found


def test_a_disk_that_is_full_when_the_lock_is_signed_is_told(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        caught = fails_with("bytes are there", RunLock, tmp_path, say=print)
    assert str(tmp_path) in str(caught) and "make room" in str(caught)


def test_a_rank_ends_when_one_of_those_above_it_is_gone(monkeypatch):
    """The runner may be gone while the launcher lives."""
    done: list[tuple] = []

    class Ended(BaseException):
        pass

    def wait(seconds: float) -> None:
        done.append(("waited", seconds))
        if len(done) > 5:
            raise Ended

    def end(code: int) -> None:
        done.append(("ended", code))
        raise Ended

    monkeypatch.setattr(guard.time, "sleep", wait)
    monkeypatch.setattr(guard.os, "kill", lambda *what: done.append(what))
    monkeypatch.setattr(guard.os, "_exit", end)
    alive, gone = (os.getpid(), os.getppid()), (os.getpid(), os.getpid())
    asked = [(os.getpid(), signal.SIGTERM), ("waited", 60.0), ("ended", 143)]
    for pairs, expected in {(alive, gone): asked, (gone, alive): asked, (alive,): [("waited", 0.5)] * 6}.items():
        done.clear()
        fails_with("", guard._watch, list(pairs), error=Ended)
        assert done == expected


def test_a_run_keeps_its_lock_where_nobody_keeps_the_object(tmp_path):
    RunLock(tmp_path, say=print)
    fails_with(f"another run is writing here .process {os.getpid()}", RunLock, tmp_path, say=print, patience_s=0.1)
