"""Stages whose target two ranks hold together, through the real command: rows and shards are those of one rank."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import heads_run
import pytest
from draftsmith.core.errors import UserError
from draftsmith.recipes.config.launch import run_recipe
from ranks_run import MAIN, run_ranks
from test_stopped_stages import ASKED, FEW, results
from training import free_port

ROOT = Path(__file__).resolve().parents[2]
TOGETHER = "target.tensor_parallel_size=2"
STAGES = ("answers", "states", "evaluate")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A whole run of one rank."""
    output = tmp_path_factory.mktemp("alone")
    heads_run.run(output, *FEW)
    return output


def rows(folder: Path) -> list[tuple]:
    """What every method emitted for every request, cycle by cycle."""
    lines = map(json.loads, (folder / "rows.jsonl").read_text().splitlines())
    return [(row["request"], row["method"], row["temperature"], row["tokens"], row["accepted"]) for row in lines]


def without(alone: Path, output: Path, *stages: str) -> list[str]:
    """A copy of the run in which these stages are still to come. Returns the command's words."""
    shutil.copytree(alone, output)
    for stage in stages:
        shutil.rmtree(output / stage)
    return [f"recipe={alone / 'reading-test.yaml'}", *FEW, f"output={output}", f"stages=[{','.join(stages)}]", TOGETHER]


def check_same(output: Path, alone: Path) -> None:
    assert rows(output / "evaluate") == rows(alone / "evaluate")
    names = {"report.md", "report.json", "probes.json", "rows.jsonl"}
    assert names <= {path.name for path in (output / "evaluate").iterdir()}
    logs = [path.name for path in (output / "evaluate" / "rows").rglob("*.jsonl")]
    assert logs and all(name.endswith("-0.jsonl") for name in logs), "rank 0 alone writes"
    lines = [line for path in (output / "evaluate" / "rows").rglob("*.jsonl") for line in path.read_text().splitlines()]
    assert len(lines) == len({tuple(json.loads(line)[1][0][k] for k in ("request", "temperature", "budget"))
                              for line in lines}), "each once"  # fmt: skip
    mine, theirs = results(output / "answers"), results(alone / "answers")
    assert mine == theirs and len(mine) > 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_the_real_command_decodes_what_one_rank_does(launcher, alone, tmp_path):
    output = tmp_path / "run"
    words = without(alone, output, *STAGES)
    start = {"deepspeed": ["deepspeed.launcher.runner", "--num_accelerators", "2"],
             "torchrun": ["torch.distributed.run", "--nproc_per_node", "2"]}[launcher]  # fmt: skip
    command = [sys.executable, "-m", *start, "--master_port", free_port(),
               "trains/train.py", *words]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_same(output, alone)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stopped_run_goes_on(stage, alone, tmp_path):
    """One of the two ranks is asked to stop: both do, after the same item."""
    output = tmp_path / "run"
    words = without(alone, output, *STAGES[STAGES.index(stage) :])
    both = run_ranks(2, ASKED, *words, cwd=ROOT, FOLDER=str(output / stage))
    assert [code for code, _ in both] == [128 + signal.SIGTERM] * 2, both
    assert not (output / stage / "done.json").exists()
    for code, text in run_ranks(2, MAIN, *words, cwd=ROOT):
        assert code == 0, text[-3000:]
    if stage != "states":
        check_same(output, alone)


def test_what_would_train_beside_the_target_is_refused(tmp_path):
    heads_run.loaded(tmp_path)
    recipe = [f"recipe={tmp_path / 'reading-test.yaml'}", TOGETHER]
    online = [*recipe, "stages.head.source={kind: online}", f"stages.head.data={json.dumps(heads_run.DATA)}"]
    online[-1] = "stages.head.data={from: world, path: train, aspect: square, max_length: 256}"
    with pytest.raises(UserError, match=r"stages\.head\.source runs the target(.|\n)*cache the states first"):
        run_recipe([*online, "stages=[head]"], "the command")
    with pytest.raises(UserError, match=r"target\.tensor_parallel_size is 2, and the run has 1 rank"):
        run_recipe([*recipe, "stages=[world,target,answers]"], "the command")
    assert not (tmp_path / "world").exists(), "before anything is made"
    assert os.listdir(tmp_path) == ["reading-test.yaml"]
