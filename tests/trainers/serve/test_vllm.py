"""vLLM writes the answers and the states that our own passes do (scripts/test_engines): text, LLaVA, Qwen2.5-VL."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from draftsmith.eval.engines.program import PYTHON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON not in os.environ, reason="no vLLM: scripts/test_engines makes its environment"),
]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def script():
    """scripts/engine_losses.py, whose recipes the table of docs/how-to/engines.md is of."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("engine_losses")
    sys.path.remove(str(ROOT / "scripts"))


def written(script, target, folder):
    recipe = script.recipe(target, questions=120, cached=False) | {"output": str(folder / "run")}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return folder / "recipe.yaml", folder / "run"


def command(path, *words):
    return [sys.executable, str(ROOT / "trains" / "train.py"), f"recipe={path}", *words]


@pytest.mark.parametrize("family", ["llama", "llava", "qwen2_5_vl"])
def test_answers_and_fifty_losses_are_our_own(script, family, tmp_path):
    path, run = written(script, family, tmp_path)
    subprocess.run(command(path), check=True, timeout=1500)
    same, number = script.equal_answers(run)
    assert same >= 0.98 * number, f"{same} of {number}: the rest must be near ties"
    own = script.losses(run / "own")
    assert own[-1] < own[0] and script.apart(run, "own", "served") <= 1e-4


def test_a_killed_server_loses_nothing(script, tmp_path):
    path, run = written(script, "llava", tmp_path)
    subprocess.run(command(path, "stages=[world,target,answers,own]"), check=True, timeout=900)
    training = subprocess.Popen(command(path, "stages=[served]"))
    lines = run / "served" / "metrics.jsonl"
    while not lines.is_file() or len(lines.read_text().splitlines()) < 10:
        assert training.poll() is None
        time.sleep(0.02)
    (worker,) = [
        int(pid) for pid in os.listdir("/proc")
        if pid.isdigit() and f"{run}/served/cache/engine-0" in _command_line(pid)
    ]  # fmt: skip
    os.killpg(worker, signal.SIGKILL)
    assert training.wait(900) == 0 and script.apart(run, "own", "served") <= 1e-4


def _command_line(pid):
    try:
        return Path("/proc", pid, "cmdline").read_text()
    except OSError:
        return ""
