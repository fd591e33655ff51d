"""Ranks end with their launchers, also with those that have ended before the ranks could look."""

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
import os, sys, time
while "orphan" in sys.argv and os.getppid() == int(os.environ["STARTED_BY"]):
    time.sleep(0.01)
from draftsmith.trainers.run import guard
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
RUNNER = "import json, os, subprocess; subprocess.run(json.loads(os.environ['LAUNCHER']))"


def asked(*words: str, runner: bool = False, name: str = "deepspeed.launcher.launch") -> str:
    """What a rank finds above it. Name and options of the launcher are words of its command, as of the real one.

    The launcher of an orphan ends as soon as it has started its rank. Who runs the tests is nobody's runner, whatever
    words its own command has.
    """
    command = [sys.executable, "-c", LAUNCHER.format(rank=RANK), name, *words]
    environment = os.environ | {"CROSS_RANK": "0", "LAUNCHER": json.dumps(command)}
    above = [sys.executable, "-c", RUNNER, "deepspeed.launcher.runner" if runner else "a shell"]
    done = subprocess.run(above, stdout=subprocess.PIPE, text=True, env=environment, timeout=60, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(("found", "words", "settings"), [
    ("2", ["--local_rank=0"], {"runner": True}),
    ("gone", ["--local_rank=0"], {}),  # the runner was killed before the launcher had started its ranks
    ("1", ["--node_rank=1", "--local_rank=0"], {}),  # a shell on another node started the launcher
    ("gone", ["--local_rank=0", "orphan"], {}),  # the launcher was killed while the rank imported
    ("1", [], {"name": "torchrun"}),
    ("1", ["--local_rank=0"], {"name": "draftsmith.trainers.run.launcher", "runner": True}),  # a script of that name
    ("0", [], {"name": "a program that runs draftsmith"}),
    ("0", ["orphan"], {"name": "a shell that ended, as under nohup"}),
])  # fmt: skip
def test_what_a_rank_finds_above_it(found, words, settings):
    assert asked(*words, **settings) == found


def test_what_cannot_be_looked_at_is_no_launcher(monkeypatch):
    monkeypatch.setattr(guard.psutil.Process, "cmdline", raising(guard.psutil.AccessDenied()))
    assert guard._launchers() == []


def test_an_orphan_begins_nothing(monkeypatch, capsys):
    monkeypatch.setattr(guard, "_launchers", lambda: None)
    fails_with("143", guard.end_with_launcher, error=SystemExit)
    assert capsys.readouterr().err == "the launcher of this rank has ended: nothing is begun\n"


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
