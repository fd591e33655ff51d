"""Every demo recipe runs end to end with a few steps; once through the real launcher with two ranks and ZeRO-2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from draftsmith.core.errors import MISTAKE
from ranks_run import MAIN, run_ranks, run_recipe
from stages_run import FEW
from training import free_port

ROOT = Path(__file__).resolve().parents[2]


def asked(output: Path, *more: str, recipe: str = "demo/lvlm-from-nothing") -> list[str]:
    return [f"recipe={recipe}", f"output={output}", *FEW, *more]


def launch(*arguments: str) -> subprocess.CompletedProcess:
    """By the real launcher."""
    launcher = ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", free_port()]
    command = [sys.executable, *launcher, "trains/train.py", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def untimed(report: dict) -> dict:
    """What of a report does not depend on the clock."""
    counted = ("benchmark", "method", "requests", "tau", "tau_interval", "num_accepted", "accepted_by_depth",
               "identical")  # fmt: skip
    cells = [{key: cell[key] for key in counted} for cell in report["cells"]]
    return {"cells": cells, "difference": report["M_minus_T"], "binding": report["binding"]}


def test_a_demo_of_another_name_is_refused_before_anything_is_installed(tmp_path):
    environment = os.environ | {"DRAFTSMITH_VENV": str(tmp_path / "venv"), "PYTHON": "false"}
    for words in (["lvlm-ovv", "seed=1"], ["demo/lvml"]):
        script = [str(ROOT / "scripts" / "demo"), *words]
        done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == MISTAKE and "error: no demo" in done.stderr and "lvlm-ov," in done.stderr
    for words in ([], ["video"], ["demo/video"], ["seed=1"], ["--help"]):
        script = [str(ROOT / "scripts" / "demo"), *words]
        done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and done.stdout.startswith("installing into") and not done.stderr, words
    assert not (tmp_path / "venv").exists()


@pytest.mark.slow  # CI runs scripts/demo itself, on two ranks
def test_two_ranks_with_zero2_from_files_to_report(tmp_path):
    zero2 = asked(tmp_path / "run", "engine.zero_stage=2")
    done = launch(*zero2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "run" / "evaluate" / "report.json").read_text())
    assert all(cell["identical"] == cell["requests"] > 0 for cell in report["cells"])
    for name in ("report.md", "acceptance.png", "speedup.png"):
        assert (tmp_path / "run" / "evaluate" / name).stat().st_size > 200
    # The draft loads in plain transformers.
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    folder = tmp_path / "run" / "finetune"
    model = LlavaForConditionalGeneration.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    assert type(processor).__name__ == "LlavaProcessor"
    assert model.config.text_config.vocab_size >= len(processor.tokenizer)

    # Two ranks share out the requests; one rank alone comes to the same report.
    run_recipe(1, *zero2, "stages=[evaluate]", "restart=evaluate", cwd=ROOT)
    other = json.loads((tmp_path / "run" / "evaluate" / "report.json").read_text())
    assert untimed(report) == untimed(other)

    assert run_recipe(2, *zero2, cwd=ROOT).count("finished before") == 7
    ((code, told),) = run_ranks(1, MAIN, *zero2, "stages.finetune.optim.lr=0.1", cwd=ROOT)
    assert code == 2 and "restart=finetune" in told
