"""The line that people watch: one on a terminal, now and then one elsewhere, and nothing in it is invented."""

import os
import pty
import re
import subprocess
import sys
from functools import partial
from typing import Literal

import pytest
from draftsmith.trainers.run import progress
from draftsmith.trainers.run.progress import StageLine, clock, of_shards
from draftsmith.trainers.run.run_time import RunTime
from draftsmith.trainers.run.stage import Planned, Stage, TrainingLength
from rich.cells import cell_len

VALUES = {"loss": 0.5, "accuracy": 0.25, "samples_per_s": 10.0, "tokens_per_s": 200.0}


@pytest.fixture
def time_of(monkeypatch):
    """A clock that stands still until it is set."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_rows(time_of):
    line = StageLine("finetune", "the draft learns to answer", (3, 8))
    first = "stage 3 of 8 · finetune: the draft learns to answer"
    assert line.rows(200) == [f"{first} · 0:00"]
    time_of[0] += 20  # models are loaded
    line.count("step", 300)
    assert line.rows(200) == [first, "step 0/300 · 0:20"], "no rate yet, and none is made up"
    time_of[0] += 60
    line.advance(120)
    assert line.rows(200) == [first, "step 120/300 · 1:30 left of about 2:50"]
    line.log(VALUES, 120)
    assert line.rows(200)[1].startswith(
        "step 120/300 · 1:30 left of about 2:50 · loss 0.5000 · accuracy 0.250 · 10.0 samples/s · 200 tokens/s · "
    )
    time_of[0] += 0.25
    assert "1:30 left" in line.rows(200)[1], "half a step on"
    time_of[0] += 10
    assert "1:30 left of about 3:00" in line.rows(200)[1], "a slow step: no more than it was to take is taken off"
    time_of[0] += 79.75
    line.advance(300)
    assert "step 300/300 · 2:50 · loss" in line.rows(200)[1]


def test_what_an_earlier_process_did_says_nothing_of_the_rate(time_of):
    line = StageLine("finetune")
    line.count("step", 300, 200)
    time_of[0] += 10
    line.advance(210)
    assert line.rows(99) == ["stage 1 of 1 · finetune", "step 210/300 · 1:30 left of about 1:40"]
    line = StageLine("evaluate")
    line.count("request", 100)
    line.skip(60)
    time_of[0] += 10
    line.advance()
    assert line.rows(99)[1] == "request 61/100 · 6:30 left of about 6:40"
    line.note("tau 2.31 so far (M)")
    assert line.rows(99)[1] == "request 61/100 · 6:30 left of about 6:40 · tau 2.31 so far (M)"


def test_without_a_total_or_of_work_that_others_follow_no_time_left_is_told(time_of):
    line = StageLine("suite")
    line.count("request", 0)
    time_of[0] += 3700
    line.advance()
    assert line.rows(99)[1] == "request 1 · 1:01:40"
    line = StageLine("cache")
    line.count("sample counted", 100, is_all=False)
    time_of[0] += 10
    line.add(50)
    assert line.rows(99)[1] == "sample counted 50/100 · 0:10"


def test_a_rank_that_has_a_share_says_so(time_of, monkeypatch):
    line = StageLine("answers")
    line.count("answer", 50, is_share=True)
    assert line.rows(99)[1].startswith("answer 0/50 ·"), "one rank has all of them"
    monkeypatch.setattr(progress.ranks, "world_size", lambda: 2)
    line.count("answer", 50, is_share=True)
    assert line.rows(99)[1].startswith("rank 0's answer 0/50 ·")
    line.count("answer", 100)
    assert line.rows(99)[1].startswith("answer 0/100 ·")


def test_shards_of_an_earlier_process_are_done():
    assert of_shards(11, 4, range(3), [0, 1, 2]) == (11, 0)
    assert of_shards(11, 4, range(3), [1]) == (11, 7), "the last shard holds three"
    assert of_shards(11, 4, [0, 2], [2]) == (7, 4), "of two ranks the first"


class Steps(Stage):
    """A training of so many steps; of none where it trains nothing."""

    kind: Literal["steps"] = "steps"
    steps: int | None = None
    what: str = "head"
    trains_something: bool = True

    def training(self, plan):
        return TrainingLength((self.what,), self.steps, 4) if self.trains_something else None


def planned(name: str, **settings) -> Planned:
    return Planned(name=name, stage=Steps(**settings), inputs={}, fingerprint="f", recipe=None)


def test_what_is_left_of_the_run_is_of_steps_to_come_alone(time_of):
    times = RunTime([
        planned("world", trains_something=False), planned("target", steps=50, what="target"),
        planned("first", steps=100), planned("second", steps=200), planned("unknown"),
        planned("other", steps=70, what="medusa"), planned("evaluate", trains_something=False),
    ])  # fmt: skip
    lines = {}
    for name, unit in (("world", "record"), ("target", "step"), ("first", "step")):
        lines[name] = StageLine(name, behind=partial(times.behind, name))
        lines[name].count(unit, 100)
        time_of[0] += 50
        lines[name].advance(50)
        first, second = lines[name].rows(200)
        assert "50/100 · 0:50 left of about 1:40" in second
        if name != "first":
            assert "run:" not in first, "no head has trained: nothing is known of one"
    # 50 s here and 200 steps of a second; not known: `unknown`, `other` and `evaluate`.
    assert first.endswith(" · first · run: about 4:10 left + 3 stages without a rate")
    assert "run:" not in lines["first"].rows(50)[0]
    second, last = (StageLine(name, behind=partial(times.behind, name)) for name in ("second", "evaluate"))
    second.count("step", 200)
    assert "run:" not in second.rows(200)[0], "it has no rate of its own yet"
    last.count("request", 10)
    time_of[0] += 10
    last.advance(5)
    assert last.rows(200) == ["stage 1 of 1 · evaluate", "request 5/10 · 0:10 left of about 0:20"], "nothing follows"


def test_a_batch_of_another_size_takes_in_proportion(time_of):
    class Larger(Steps):
        def training(self, plan):
            return TrainingLength(("head",), 10, 8)

    later = Planned(name="later", stage=Larger(), inputs={}, fingerprint="f", recipe=None)
    times = RunTime([planned("first", steps=100), later])
    assert times.behind("first", None) is None and times.behind("first", 1.0) == (20.0, 0)
    assert times.behind("first", None) == (20.0, 0), "the last rate stands"
    assert times.behind("passed over", 1.0) is None


@pytest.mark.parametrize("width", range(20, 160, 7))
def test_it_fits_and_what_matters_is_cut_last(time_of, width):
    line = StageLine("finetune", "the draft learns to answer (LLaVA-1.5's second stage)", (3, 8))
    line.count("step", 300)
    time_of[0] += 60
    line.advance(120)
    line.log(VALUES, 120)
    first, second = line.rows(width)
    assert len(first) <= width and first.startswith("stage 3 of 8 · finet"[: width - 1])
    assert len(second) <= width and second.startswith("step 120/300 · 1:30 left"[: width - 1])
    if width >= 80:  # what terminals have at least
        assert "the draft learns to answer" in first and "loss 0.5000 · accuracy 0.250" in second
    assert ("of about" in second) <= ("accuracy" in second), "the stage's whole time goes before the loss"
    wide = StageLine("調整", "画像を説明する " * 9)
    wide.count("step", 3)
    assert all(cell_len(row) <= width for row in wide.rows(width)), "such characters take two cells"


def test_without_a_terminal_there_are_sparse_lines(time_of, capsys):
    line = StageLine("pretrain", "about")
    with line.shown():
        line.count("step", 40)
        for step in range(1, 41):
            time_of[0] += 1
            line.advance(step)
            line.log(VALUES, step)
        line.log({"val_loss": 0.25}, 40)
    lines = capsys.readouterr().out.splitlines()
    assert [one.split(" loss")[0] for one in lines] == [
        "pretrain 1/40", "pretrain 12/40", "pretrain 23/40", "pretrain 34/40", "pretrain 40/40",
        "pretrain 40/40 validation:",
    ]  # fmt: skip
    assert lines[-1] == "pretrain 40/40 validation: loss 0.2500"
    assert re.fullmatch(r"pretrain 1/40 loss 0.5000 accuracy 0.250 10.0 samples/s 200 tokens/s \d+\.\d GiB", lines[0])


def test_without_a_terminal_other_stages_say_how_far_they_are(time_of, capsys):
    """Every half a minute, whatever moves on: answers, or the tokens inside a batch of them."""
    line = StageLine("answers", live=False)
    line.count("answer", 100)
    line.note("12 tokens")
    time_of[0] += 31
    line.note("4,000 tokens", "190 tokens/s")
    time_of[0] += 9
    line.advance(32)
    time_of[0] += 31
    line.advance(64)
    time_of[0] += 3
    line.advance(100)
    assert capsys.readouterr().out.splitlines() == [
        "answers answer 0/100 · 0:31 · 4,000 tokens · 190 tokens/s",
        "answers answer 64/100 · 0:40 left · 4,000 tokens · 190 tokens/s",
    ]


def test_times():
    assert [clock(s) for s in (0, 59.6, 250, 3600, 11229)] == ["0:00", "1:00", "4:10", "1:00:00", "3:07:09"]


SCRIPT = """
import sys, time
from draftsmith.trainers.run.progress import StageLine
line = StageLine("finetune", "the draft learns to answer questions about pictures", (3, 8))
values = {"accuracy": 0.25, "samples_per_s": 10.0, "tokens_per_s": 200.0}
with line.shown():
    line.count("step", 4)
    for step in range(1, 5):
        time.sleep(0.6)
        line.advance(step)
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


def test_a_terminal_shows_two_rows_that_change(tmp_path):
    shown = on_a_terminal(tmp_path)
    assert "\x1b[2K" in shown and "\x1b[1A" in shown, "the rows are written over"
    assert "\x1b[?25l" not in shown, "a hidden cursor would stay hidden behind a second Ctrl-C"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    first = "stage 3 of 8 · finetune: the draft learns to answer questions about pictures\r\n"
    running = rf"{first}step [1-4]/4 · 0:\d\d[^\r]* · loss (1|0\.5|0\.3)\d* · accuracy 0.250"
    assert re.search(running, plain), "while it runs"
    for step in range(1, 5):
        assert f"said {step}\r\n" in plain and f"warned {step}\r\n" in plain
    last = plain.rstrip().splitlines()[-2:]
    assert last[0] == first.strip(), "the last state stays"
    assert re.match(r"step 4/4 · 0:\d\d · loss 0.2500 · accuracy 0.250", last[1])
    assert max(map(cell_len, plain.splitlines())) < 80, "a row that wraps could not be written over"


def test_errors_that_go_to_a_file_go_on_to_the_file(tmp_path):
    with open(tmp_path / "log", "w") as log:
        shown = on_a_terminal(tmp_path, stderr=log)
    assert "warned" not in shown and (tmp_path / "log").read_text().count("warned") == 4


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, pytest.param({"CI": "true"}, marks=pytest.mark.slow)])
def test_a_terminal_that_is_a_log_gets_no_control_characters(tmp_path, environment):
    shown = on_a_terminal(tmp_path, **environment)
    assert "\x1b" not in shown and "stage 3 of 8" not in shown and "said 4" in shown


def test_a_pipe_is_not_watched_even_where_colours_are_forced():
    code = "from draftsmith.trainers.run.progress import watched; print(watched())"
    environment = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert said.stdout == "False\n"
