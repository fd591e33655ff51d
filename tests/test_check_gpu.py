"""scripts/check_gpu.py: the steps in their order, what is judged, and one track on two ranks of a CPU."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import check_gpu  # noqa: E402


def test_the_steps_begin_with_one_rank_and_end_with_all():
    rows = check_gpu.plan(Path("out"), ["draft", "image head"], [1, 2, 8], quick=False)
    steps = [(row.step.split(": ")[-1], row.ranks) for row in rows]
    both = ("train and evaluate", "evaluate alone", "waits of a training step")
    assert steps[:2] == [("all-reduce", 2), ("all-reduce", 8)] and steps[2:4] == [(both[0], 1)] * 2
    assert steps[4:6] == [("evaluate without graphs", 1), ("launches with graphs", 1)], "of the draft alone"
    assert check_gpu.EAGER in rows[4].command and check_gpu.EAGER not in rows[2].command
    assert "--launches" in rows[5].command and {"stages=[evaluate]", "restart=evaluate"} <= {*rows[5].command}
    assert steps[6:10] == [(both[1], 2), (both[1], 8)] * 2
    assert steps[10:14] == [(both[0], 2), (both[0], 8)] * 2 and steps[14:16] == [(both[2], 1)] * 2
    assert steps[16:] == [("score rows of passes in bfloat16", 1)] and "--identical" in rows[16].command
    alone = rows[6].command
    assert {"stages=[evaluate]", "restart=evaluate", "--nproc-per-node=2"} <= {*alone}
    trained = next(word for word in rows[2].command if word.startswith("output="))
    assert trained in alone, "of the weights that one rank trained"


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", check_gpu.TRACKS)
def test_the_tracks_are_recipes(name, quick):
    track = check_gpu.TRACKS[name]
    loaded = load([*track.words(Path("out"), quick), *([] if name == "image head" else [check_gpu.EAGER])])
    assert [p.name for p in plan(loaded.recipe, loaded.path)][-1] == "evaluate"
    assert {*track.trained} <= {*loaded.recipe.stages}


def rows_of(folder, identical=True, emitted=(2, 3)):
    folder.mkdir(parents=True)
    row = {"method": "M", "drafter": "d", "benchmark": "b", "budget": "", "temperature": 0, "identical": identical}
    lines = [row | {"emitted": [*emitted]}, row | {"temperature": 1, "identical": None, "emitted": [9]}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "report.md").write_text("- seed: 0\n")


def judged(tmp_path, known, **rows):
    output = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
    rows_of(output / "evaluate", **rows)
    script = "print('step 1 loss 2 0.5 GiB'); print('step 2 1.5 GiB')"
    command = [sys.executable, "-c", script, f"output={output}"]
    row = check_gpu.Row("draft: evaluate alone", 2, "tau of 1 rank", command=command)
    check_gpu.run(row, tmp_path, known)
    return row


def test_a_step_is_judged_by_tokens_and_tau(tmp_path):
    known = {"draft": {"M d, b ": 2.5}}
    row = judged(tmp_path, known)
    assert row.good and re.fullmatch(r"greedy identical, tau equal, tau 2\.50 \(M d, b\), 1\.5 GiB, \d+ s", row.result)
    assert not judged(tmp_path, known, identical=False).good
    other = judged(tmp_path, known, emitted=(2, 2))
    assert not other.good and "tau differs" in other.result
    replayed, failed = "the target: 2 captured in 0.1 s, 9 passes replayed", "off since a capture failed"
    said_and_good = {replayed: True, "the target: off": False, f"{replayed}; {failed}": False}
    for number, (said, good) in enumerate(said_and_good.items()):
        output = tmp_path / f"graphs-{number}"
        rows_of(output / "evaluate")
        (output / "evaluate" / "report.md").write_text(f"- CUDA graphs: {said}\n")
        graphs = check_gpu.Row("draft: x", 1, "tau of 1 rank", command=[sys.executable, "-c", "", f"output={output}"])
        check_gpu.run(graphs, tmp_path, known)
        assert graphs.good is good and said in graphs.result and "tau equal" in graphs.result
    failing = check_gpu.Row("draft: x", 1, "greedy identical", command=[sys.executable, "-c", "exit(3)", "output=a"])
    check_gpu.run(failing, tmp_path, known)
    assert not failing.good and failing.result.startswith("exit code 3")
    assert "| draft: x | 1 | greedy identical | exit code 3" in check_gpu.table([failing], {"torch": "2"})


def test_a_sum_and_waits_are_judged_by_their_number(tmp_path):
    def found(expected, text, *more):
        row = check_gpu.Row("a", 1, expected, command=[sys.executable, "-c", f"print({text!r})", *more])
        check_gpu.run(row, tmp_path, {})
        return row.good

    assert found("1", "1 by nccl, 200.0 GB/s of 256 MB") and not found("1", "2 by nccl")
    assert found("at most 1", "0.88 waits a step", "--waits") and not found("at most 1", "2.00 waits a step", "--waits")
    assert found("at most 1", "not measurable without CUDA", "--waits")
    assert found("told alone", "a table", "--identical")
    assert found("at most 0.5", "0.14 of eager passes'", "--launches", "output=a")
    assert not found("at most 0.5", "0.51 of eager passes'", "--launches", "output=a")


def until_gone(ask):
    for _ in range(200):
        ask()
        time.sleep(0.05)


def test_a_stop_ends_what_a_step_has_started(tmp_path, monkeypatch):
    """Its ranks, too, which the step's own command has started; the table does not call failed what never ran."""
    started = tmp_path / "started"
    ranks = f"import pathlib, time; pathlib.Path({str(started)!r}).write_text('x'); time.sleep(60)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ranks!r}])"
    row = check_gpu.Row("draft: x", 2, "greedy identical", command=[sys.executable, "-c", script])

    def stop(process, *_):
        while not started.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(check_gpu.subprocess.Popen, "communicate", stop)
    groups, kill = [], os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, sign: groups.append(group) or kill(group, sign))
    with pytest.raises(KeyboardInterrupt):
        check_gpu.run(row, tmp_path, {})
    with pytest.raises(ProcessLookupError):  # nobody of the group is left
        until_gone(lambda: kill(groups[0], 0))
    assert "| greedy identical | not run |  |" in check_gpu.table([row], {})


def test_evaluation_alone_of_a_run_that_is_there():
    rows = check_gpu.evaluation_of(Path("/runs/a/recipe.yaml"), [1, 8])
    assert [row.expected for row in rows] == ["greedy identical", "tau of 1 rank"]
    assert all("output=/runs/a" in row.command and "stages=[evaluate]" in row.command for row in rows)


@pytest.mark.slow
def test_a_track_on_two_ranks_of_a_cpu(tmp_path):
    words = ["--ranks", "1", "2", "--tracks", "draft", "--quick", "--folder", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), *words], capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    table = (tmp_path / "table.md").read_text()
    assert table.count("| ok |") == 8 and "rows equal" in table and "tau equal" in table and "1 by gloo" in table
