"""`draftsmith doctor`: each fault is found where it is, with its hint, and nothing is asked of the network unasked."""

import shutil
import sys
import urllib.request
from collections.abc import Iterable

import pytest
import torch
from draftsmith.core import ranks as ranks_module
from draftsmith.core.errors import FAULTS, OK
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config import health
from draftsmith.recipes.config.finding import Finding, report
from fails import raising
from packaging.utils import canonicalize_name


def levels(findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.subject: finding.level for finding in findings}


def test_the_whole_of_it_here(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(urllib.request, "urlopen", raising(AssertionError("the network was used")))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = main(["doctor", "--output", str(tmp_path / "runs")])
    printed = capsys.readouterr().out
    assert code in (OK, FAULTS) and (code == FAULTS) == ("fault   " in printed)
    for subject in ("Python", "packages", "GPU", "DeepSpeed", "disk of runs", "memory", "threads", "Hub login",
                    "wandb"):  # fmt: skip
        assert subject in printed
    assert list(tmp_path.iterdir()) == []


def test_another_python_and_what_deepspeed_needs_are_faults(monkeypatch, tmp_path):
    monkeypatch.setattr(health.sys, "version_info", (3, 13, 0))
    monkeypatch.setitem(sys.modules, "draftsmith.trainers.train.engine", None)
    result = levels(health.look(tmp_path, 1))
    assert (result["Python"], result["DeepSpeed"]) == ("fault", "fault")


def test_versions_against_what_is_required_and_what_was_tested():
    have = {r.name: health.pins()[canonicalize_name(r.name)] for r in health.requirements()}
    assert levels(health.packages(have)) == {"packages": "ok"}
    have |= {"torch": "2.13.0+cpu", "transformers": "4.57.6", "wandb": None, "peft": "0.20.0"}
    result = [*health.packages(have)]
    assert levels(result) == {"transformers": "fault", "wandb": "fault", "peft": "warning", "packages": "ok"}
    by_name = {finding.subject: finding for finding in result}
    assert "transformers" in by_name["transformers"].hint and "not installed" in by_name["wandb"].what
    assert f"pip install peft=={health.pins()['peft']}" in by_name["peft"].hint


@pytest.mark.parametrize(("given", "ranks", "level", "best"), [
    (None, 2, "ok", "4"), ("4", 2, "ok", None), ("8", 2, "fault", "4"), ("1", 16, "fault", "1"),
    (None, 16, "fault", None), ("many", 1, "fault", "8"), ("0", 1, "fault", "8"),
])  # fmt: skip
def test_ranks_times_threads_against_the_cores(given, ranks, level, best, monkeypatch):
    monkeypatch.setattr(ranks_module, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    result = health.threads(ranks)
    assert result.level == level
    if best is not None and level == "fault":
        assert f"OMP_NUM_THREADS={best}" in result.hint


def test_cores_are_those_that_the_container_may_use(tmp_path, monkeypatch):
    quota = tmp_path / "cpu.max"
    quota.write_text("100000 100000\n")
    monkeypatch.setattr(ranks_module, "Path", lambda name: quota)
    assert ranks_module.num_cores() == 1
    quota.write_text("max 100000\n")
    assert ranks_module.num_cores() >= 1


def test_a_gpu_beside_a_cpu_build_is_a_fault(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", None)
    (result,) = health.devices()
    assert result.level == "fault" and "CPU build" in result.what and "CUDA" in result.hint
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    (result,) = health.devices()
    assert result.level == "fault" and "CUDA_VISIBLE_DEVICES" in result.hint


@pytest.mark.parametrize("offline", [True, False])
def test_logins_show_no_key(offline, monkeypatch, capsys):
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secretsecret")
    monkeypatch.setenv("WANDB_API_KEY", "secretsecret")
    report([*health.logins()])
    text = capsys.readouterr().out
    assert "secretsecret" not in text and "WANDB_API_KEY is set" in text
    assert ("HF_HUB_OFFLINE is set" in text) == offline
