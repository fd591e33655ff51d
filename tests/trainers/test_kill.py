"""Killed anywhere, by any signal, started again with the same command: the losses are those of a run left alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from ranks_run import MAIN, end_ranks, run_ranks, run_recipe, start_ranks
from stages_run import TINY_DATASET
from training import free_port

ROOT = Path(__file__).resolve().parents[2]
STEPS, STOPPED = 14, 5  # behind the checkpoint of step 3, with steps left in which a signal arrives
SETTINGS = [
    *TINY_DATASET,
    f"stages.target.steps={STEPS}",
    "stages.target.batch_size=8",
    "stages.target.log_every=1",
    "stages.target.checkpoints.every=3",
    "engine.zero_stage=1",
]


PORT = free_port()  # one for all: the second run must not trip over the port of the first


def start(output: Path) -> subprocess.Popen:
    launcher = ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", PORT]
    command = [sys.executable, *launcher, "trains/train.py"]
    return subprocess.Popen(
        [*command, "recipe=demo/lvlm-from-nothing", f"output={output}", *SETTINGS],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(output: Path) -> str:
    return run_recipe(2, "recipe=demo/lvlm-from-nothing", f"output={output}", *SETTINGS, cwd=ROOT)


def losses(output: Path) -> dict[int, float]:
    path = output / "target" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    assert len({r["step"] for r in rows}) == len(rows), "a step stands twice"
    return {r["step"]: r["loss"] for r in rows}


def victim(runner: subprocess.Popen, receiver: str) -> int:
    """The process that gets the signal: the runner, the launcher under it, or rank 1 under that."""
    if receiver == "runner":
        return runner.pid
    (launcher,) = psutil.Process(runner.pid).children()
    return launcher.pid if receiver == "launcher" else max(child.pid for child in launcher.children())


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A run that nobody disturbs."""
    output = tmp_path_factory.mktemp("alone") / "run"
    finish(output)
    assert sorted(losses(output)) == list(range(1, STEPS + 1))
    return output


def begun(alone: Path, folder: Path) -> Path:
    """A run whose stages before the target are finished."""
    for stage in ("world", "seeing"):
        shutil.copytree(alone / stage, folder / "run" / stage)
    return folder / "run"


def wait_for_steps(output: Path, count: int, alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while len(losses(output)) < count:
        assert time.monotonic() < deadline and alive(), f"{len(losses(output))} steps"
        time.sleep(0.02)


def check_same(output: Path, alone: Path, said: str) -> None:
    assert "resuming from" in said
    assert losses(output) == losses(alone)
    assert (output / "target" / "model.safetensors").read_bytes() == (
        alone / "target" / "model.safetensors"
    ).read_bytes()


def test_two_ranks_of_which_one_is_killed_resume_bit_equal(alone, tmp_path):
    """Without a launcher, whose processes take most of the time of the cases below."""
    output = begun(alone, tmp_path)
    ranks = start_ranks(2, MAIN, "recipe=demo/lvlm-from-nothing", f"output={output}", *SETTINGS, cwd=ROOT)
    wait_for_steps(output, STOPPED, ranks[1].process.is_alive)
    os.kill(ranks[1].process.pid, signal.SIGKILL)
    # The same command at once: it waits for ranks that are still alive, and never writes beside them.
    text = finish(output)
    (waited, _), (killed, _) = end_ranks(ranks)
    assert killed == -signal.SIGKILL and waited != 0, "rank 0 does not go on without its peer"
    check_same(output, alone, text)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("receiver", ["runner", "launcher", "rank"])
def test_two_ranks_resume_bit_equal(alone, tmp_path, number, receiver):
    output = begun(alone, tmp_path)
    runner = start(output)
    wait_for_steps(output, STOPPED, lambda: runner.poll() is None)
    os.kill(victim(runner, receiver), number)
    text = finish(output)
    runner.communicate(timeout=120)
    check_same(output, alone, text)


# The rank named by the environment gets SIGTERM after the step named there, as if someone had typed `kill`.
ASKED = """
import dataclasses, os, signal, sys
from draftsmith.core import ranks
from draftsmith.core.tracking import Tracker
from draftsmith.recipes.commands.cli import main
from draftsmith.trainers.train import fit

real = fit.train

def train(engine, training, *rest, **named):
    source, seen = training.source, []

    def asking(batch):
        seen.append(batch)
        if len(seen) == int(os.environ["STEP"]) and ranks.rank() == int(os.environ["ASKED"]):
            os.kill(os.getpid(), signal.SIGTERM)
        return source(batch)

    real(engine, dataclasses.replace(training, source=asking), *rest, **named)

fit.train = train
sys.exit(main(sys.argv[1:]))
"""


def test_sigterm_to_one_of_two_ranks_stops_both_and_the_same_command_goes_on(alone, tmp_path):
    output = begun(alone, tmp_path)
    arguments = ["recipe=demo/lvlm-from-nothing", f"output={output}", *SETTINGS]
    result = run_ranks(2, ASKED, *arguments, cwd=ROOT, timeout=120, STEP=str(STOPPED), ASKED="1")
    assert [code for code, _ in result] == [143, 143], result
    assert f"stopped after step {STOPPED}: the same command continues from there" in result[0][1]
    assert sorted(losses(output)) == list(range(1, STOPPED + 1)) and not (output / "target" / "done.json").exists()
    text = finish(output)
    assert "resuming from" in text and f"step {STOPPED}" in text
    assert losses(output) == losses(alone)
    weights = "model.safetensors"
    assert (output / "target" / weights).read_bytes() == (alone / "target" / weights).read_bytes()


def test_the_same_command_twice_never_writes_twice(tmp_path):
    from draftsmith.core.errors import UserError
    from draftsmith.trainers.run.guard import RunLock

    first = RunLock(tmp_path, say=print)
    with pytest.raises(UserError, match=f"another run is writing here .process {os.getpid()}"):
        RunLock(tmp_path, say=print, patience_s=0.3)
    # An earlier run with more ranks counts too.
    first.release()
    import fcntl

    with open(tmp_path / ".locks" / "rank-00001", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another run"):
            RunLock(tmp_path, say=print, patience_s=0.3)
    RunLock(tmp_path, say=print, patience_s=0.3).release()
