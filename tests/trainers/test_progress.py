"""The line that people watch: one on a terminal, now and then one elsewhere, and nothing in it is invented."""

import os
import pty
import re
import subprocess
import sys

import pytest
from draftsmith.trainers.run import progress
from draftsmith.trainers.run.progress import StageLine, of_shards

VALUES = {"loss": 0.5, "accuracy": 0.25, "samples_per_s": 10.0, "tokens_per_s": 200.0}


@pytest.fixture
def time_of(monkeypatch):
    """A clock that stands still until it is set."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_is_of_the_rate_of_this_process(time_of, capsys):
    line = StageLine("evaluate", live=False)
    line.count("request", 100)
    line.skip(60)
    time_of[0] += 31
    line.advance()
    time_of[0] += 31
    line.advance()
    line.count("request", 0)
    time_of[0] += 3700
    line.advance()
    assert capsys.readouterr().out.splitlines() == [
        "evaluate request 61/100 · 0:31", "evaluate request 62/100 · 19:38 left", "evaluate request 1 · 1:01:40",
    ], "one of them has no rate yet, and none is made up"  # fmt: skip


def test_shards_of_an_earlier_process_are_done():
    assert of_shards(11, 4, range(3), [0, 1, 2]) == (11, 0)
    assert of_shards(11, 4, range(3), [1]) == (11, 7), "the last shard holds three"
    assert of_shards(11, 4, [0, 2], [2]) == (7, 4), "of two ranks the first"


def test_without_a_terminal_there_are_sparse_lines(time_of, capsys):
    line = StageLine("pretrain", "about", live=False)
    with line.shown():
        line.count("step", 40)
        for step in range(1, 41):
            time_of[0] += 1
            line.advance()
            line.log(VALUES, step)
        line.log({"val_loss": 0.25}, 40)
    *lines, last = capsys.readouterr().out.splitlines()
    assert [one.split(" · ")[0] for one in lines] == [f"pretrain step {n}/40" for n in (1, 11, 21, 31, 40)]
    assert last == "pretrain 40/40 validation: loss 0.2500"
    assert re.fullmatch(
        r"pretrain step 11/40 · 0:29 left · loss 0.5000 · accuracy 0.250 · 10.0 samples/s · 200 tokens/s · \d+\.\d GiB",
        lines[1],
    )


SCRIPT = """
import sys, time
from draftsmith.trainers.run.progress import StageLine
line = StageLine("finetune", "the draft learns to answer questions about pictures", (3, 8))
values = {"accuracy": 0.25, "samples_per_s": 10.0, "tokens_per_s": 200.0}
with line.shown():
    line.count("step", 4)
    for step in range(1, 5):
        time.sleep(0.6)
        line.advance()
        line.log({"loss": 1.0 / step, **values}, step)
        print(f"said {step}", flush=True)
        print(f"warned {step}", file=sys.stderr, flush=True)
"""


def on_a_terminal(tmp_path, *, stderr=None, **environment) -> str:
    """What a terminal of 80 columns gets from a process that shows its progress."""
    ours, its = pty.openpty()
    keep = {k: v for k, v in os.environ.items() if k not in ("CI", "TERM", "NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=its, stdout=its, stderr=its if stderr is None else stderr,
        env=keep | {"COLUMNS": "80", "TERM": "xterm"} | environment,
    )  # fmt: skip
    os.close(its)
    got = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the terminal's other end is closed
            break
        if not piece:
            break
        got += piece
    os.close(ours)
    assert process.wait(60) == 0
    return got.decode()


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, pytest.param({"CI": "true"}, marks=pytest.mark.slow)])
def test_a_terminal_that_is_a_log_gets_no_control_characters(tmp_path, environment):
    shown = on_a_terminal(tmp_path, **environment)
    assert "\x1b" not in shown and "stage 3 of 8" not in shown and "said 4" in shown


def test_a_terminal_keeps_its_cursor(tmp_path):
    """A process that is killed could not show it again."""
    shown = on_a_terminal(tmp_path)
    assert "stage 3 of 8" in shown and "\x1b[?25l" not in shown
