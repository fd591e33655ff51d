"""The launcher of `draftsmith demo`: silent, but for what must be said."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from draftsmith.core import ranks
from draftsmith.recipes.commands import cli

RANK = """
import os, signal, sys, time
how = sys.argv[-1]
if how in ("hangs", "saves"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, f"rank {os.environ['RANK']} {os.getpid()} {sys.argv[1]}\\n".encode())
if how == "hangs" and os.environ["RANK"] == "1":
    sys.exit(2)
if how == "dies" and os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "refuses" and os.environ["RANK"] == "0":
    print("error: no", file=sys.stderr, flush=True)
    sys.exit(2)
time.sleep(60)
"""
LAUNCHER = "from draftsmith.trainers.run import launcher as it; it._GRACE_S = {}; raise SystemExit(it.main({}))"


@pytest.fixture
def started(tmp_path):
    (tmp_path / "a_rank.py").write_text(RANK)

    def start(*words, grace_s=30.0):
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path}
        command = [sys.executable, "-c", LAUNCHER.format(grace_s, ["a_rank", *words])]
        return subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return start


@pytest.mark.parametrize(("how", "code", "last"), [
    ("refuses", 2, "error: no"), ("dies", 128 + signal.SIGKILL, "  hint:  the same command continues"),
])  # fmt: skip
def test_an_error_stands_last_and_alone(started, how, code, last):
    process = started(how)
    said = [line for line in process.communicate(timeout=120)[0].splitlines() if not line.startswith("rank ")]
    assert process.returncode == code and said[-1].startswith(last)
    assert len(said) == (2 if how == "dies" else 1) and said[0].startswith("error: ")
    if how == "dies":
        assert "ended by SIGKILL" in said[0]


def test_a_stop_ends_the_ranks_with_its_own_code(started):
    process = started("waits")
    assert process.stdout.readline().startswith("rank ")
    process.terminate()
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 143 and not [line for line in said.splitlines() if not line.startswith("rank ")]


def said_by_ranks(process) -> list[list[str]]:
    """Number, process and first word of each rank."""
    return sorted(process.stdout.readline().split()[1:] for _ in range(2))


def test_a_rank_that_hangs_after_another_failed_is_ended_though_a_stop_is_asked_for(started):
    process = started("hangs", grace_s=3.0)
    ranks = said_by_ranks(process)
    assert [rank[2] for rank in ranks] == ["--local_rank=0", "--local_rank=1"]
    while psutil.pid_exists(int(ranks[1][1])):
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 2


def test_a_rank_that_is_killed_in_a_stop_is_not_waited_for(started):
    process = started("saves", grace_s=1.0)
    ranks = said_by_ranks(process)
    process.terminate()
    time.sleep(2)
    assert process.poll() is None, "both save"
    os.kill(int(ranks[1][1]), signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == 143


def test_a_second_ctrl_c_ends_the_ranks(started):
    process = started("saves")
    said_by_ranks(process)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    process.communicate(timeout=15)
    assert process.returncode == 143


def test_a_rank_without_the_word_waits_for_the_one_that_has_it(monkeypatch, capsys):
    """Its exit would make the launcher end rank 0 before that has told the mistake."""
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(ranks, "has_group", lambda: False)  # earlier tests of this process may have made a group
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("CROSS_RANK", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert cli.main(["recipe=demo/nowhere"]) == 2 and not waited and capsys.readouterr().err == ""
    monkeypatch.setenv("CROSS_RANK", "0")
    assert cli.main(["recipe=demo/nowhere"]) == 2 and waited == [cli._OTHERS_S]
    assert capsys.readouterr().err.startswith("rank 1: error: no recipe"), "a mistake of this rank alone is not lost"
