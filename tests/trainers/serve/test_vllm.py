"""vLLM writes the answers and the states that our own passes do (scripts/test_engines): text, LLaVA, Qwen2.5-VL."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.data.shards.shards import ShardReader
from engine_targets import TARGETS
from vllm_server import IN_VLLM

pytestmark = IN_VLLM
ROOT = Path(__file__).resolve().parents[3]


STEPS, QUESTIONS = 50, 120


def recipe(target: str) -> dict[str, Any]:
    """A target of a few steps, both engines' answers to the same questions, and the same training from both."""
    sees, whole = target != "llama", target.startswith("qwen")
    form = {"system": "", "image_rule": "verbatim", "template": "qwen_vl" if whole else "v1"}
    data = {"from": "world", "path": "train", "max_length": 256, "max_samples": QUESTIONS}
    data |= {"aspect": "square"} if target == "llava" else {}
    optim = {"lr": 2.0e-3, "warmup_steps": 5, "clip_norm": 1.0}
    trained = {"kind": "train", "format": form, "data": data, "steps": STEPS, "batch_size": 8, "optim": optim}
    trained |= {"log_every": 1}
    answers = {"kind": "regenerate", "format": form, "data": data, "max_new_tokens": 32}
    head = trained | {"from": "scratch", "answers": {"from": "answers"}}
    splits = {"caption": 100, "colors": 60, "sums": 60} if sees else {"sums": 220}
    parts = ["vision_tower", "projector", "language_model"] if sees else ["language_model"]
    drafter = {"kind": "eagle3", "taps": [1, 3, 6]} | ({"visual_slots": "read", "image": "placeholder"} if sees else {})
    vllm = {"kind": "vllm", "max_num_seqs": 16}
    stages = {
        "world": {"kind": "generate", "splits": {"train": splits}} | ({"patch_size": 8} if whole else {}),
        "target": trained | {"model": "target", "trainable": parts},
        "answers": answers,
        "answers_vllm": answers | {"engine": vllm},
        "own": head,
        "served": head | {"source": {"kind": "online", "engine": vllm}},
    }
    return {"target": TARGETS[target], "drafter": drafter, "stages": stages}


def losses(folder: Path) -> list[float]:
    """Of each step of a finished training."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def apart(run: Path) -> float:
    """The largest relative difference of the losses of any step."""
    own, served = losses(run / "own"), losses(run / "served")
    assert len(own) == len(served) == STEPS
    return max(abs(a - b) / abs(a) for a, b in zip(own, served, strict=True))


def written(target, folder):
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump(recipe(target) | {"output": str(folder / "run")}, sort_keys=False)
    )
    return folder / "recipe.yaml", folder / "run"


def command(path, *words):
    return [sys.executable, str(ROOT / "trains" / "train.py"), f"recipe={path}", *words]


@pytest.mark.parametrize("family", ["llama", "llava", "qwen2_5_vl"])
def test_answers_and_fifty_losses_are_our_own(family, tmp_path):
    path, run = written(family, tmp_path)
    subprocess.run(command(path), check=True, timeout=1500)
    ours, theirs = (ShardReader(run / stage / "answers") for stage in ("answers", "answers_vllm"))
    same = sum(ours[i][1]["ids"].tolist() == theirs[i][1]["ids"].tolist() for i in range(len(ours)))
    assert same >= 0.98 * len(ours), f"{same} of {len(ours)}: the rest must be near ties"
    own = losses(run / "own")
    assert own[-1] < own[0] and apart(run) <= 1e-4


def test_a_killed_server_loses_nothing(tmp_path):
    path, run = written("llava", tmp_path)
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
    assert training.wait(900) == 0 and apart(run) <= 1e-4


def _command_line(pid):
    try:
        return Path("/proc", pid, "cmdline").read_text()
    except OSError:
        return ""
