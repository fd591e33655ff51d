"""The recorded behaviour of `tests/goldens`: the quick part here, all of it by `tests/tools/freeze.py check`."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "tools" / "freeze.py"


@pytest.fixture(scope="module")
def freeze():
    spec = importlib.util.spec_from_file_location("freeze", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        spec.loader.exec_module(module)
    return module


def test_the_quick_part_is_as_recorded():
    command = [sys.executable, str(SCRIPT), "check", "dry-runs", "visual-ar"]
    # What hangs, not what is slow: on a processor without bfloat16, beside other work, it took more than four minutes.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "no difference" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("run", ["dflash", "video", "visual-ar-blocks"])
def test_without_the_fast_forms_losses_agree_and_tokens_are_equal(run):
    command = [sys.executable, str(SCRIPT), "check", "--close", run]
    fast = os.environ | {"DRAFTSMITH_FAST": "0"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=fast, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_every_run_and_every_recipe_is_recorded(freeze):
    recorded = {path.name for path in freeze.GOLDENS.glob("*.json")}
    assert {f"{name}.json" for name in freeze.RUNS} | {"machines.json"} == recorded
    demos = {f"demo/{path.stem}" for path in (ROOT / "recipes" / "demo").glob("*.yaml")}
    fetched = {
        "demo/smollm2",
        "demo/smollm2-full",
        "demo/emoji-vlm",
        "demo/emoji-vlm-full",
        "demo/drawings",
        "demo/drawings-full",
    }  # their target or pictures do not come with the package
    assert {run["recipe"] for run in freeze.RUNS.values()} == demos - fetched
    recipes = len(list((ROOT / "recipes").rglob("*.yaml")))
    assert len(list((freeze.GOLDENS / freeze.DRY_RUNS).glob("*.txt"))) == recipes


def test_a_run_recorded_here_says_nothing_of_the_others_machines(freeze, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(freeze, "GOLDENS", tmp_path)
    monkeypatch.setattr(freeze, "MACHINES", tmp_path / "machines.json")
    monkeypatch.setattr(
        freeze, "run_one", lambda name: {f"{name}.json": {"loss": 1.0, "w": "F32 [2] 0123456789abcdef"}}
    )
    freeze.write(tmp_path / "machines.json", {"a": {"processor": "another"}, "b": {"processor": "another"}})
    freeze.write(tmp_path / "a.json", {"loss": 1.001, "w": "F32 [2] 4567456789abcdef"})
    freeze.record(["b"])
    assert freeze.read(tmp_path / "machines.json") == {"a": {"processor": "another"}, "b": freeze.machine()}
    assert freeze.check(["a", "b"]) == 0, capsys.readouterr().out
    assert "a: recorded on {'processor': 'another'}" in capsys.readouterr().out


def test_a_difference_is_named(freeze):
    old = {"stages": {"a": {"metrics": [{"step": 1, "loss": 0.5}], "weights": {"w": "F32 [2] 0123456789abcdef"}}}}
    new = {"stages": {"a": {"metrics": [{"step": 1, "loss": 0.5000001}], "weights": {"v": "F32 [2] 0123456789abcdef"}}}}
    assert freeze.differences(old, old, same_machine=True) == []
    assert freeze.differences(old, new, same_machine=True) == [
        "stages/a/metrics[0]/loss: 0.5 -> 0.5000001",
        "stages/a/weights/w: 'F32 [2] 0123456789abcdef' -> '(absent)'",
        "stages/a/weights/v: '(absent)' -> 'F32 [2] 0123456789abcdef'",
    ]
    # Elsewhere the last bits are another machine's, and names are not.
    assert len(freeze.differences(old, new, same_machine=False)) == 2
    assert freeze.differences({"loss": 1.0}, {"loss": 1.02}, same_machine=False) == ["loss: 1.0 -> 1.02"]


def test_other_forms_of_the_same_arithmetic_differ_in_last_bits_alone(freeze):
    old = {"loss": 0.5, "w": "F32 [2] 0123456789abcdef", "decoded": {"q": ["1x drafted: 1 2"]}}
    assert not freeze.differences(
        old, old | {"loss": 0.50001, "w": "F32 [2] 4567456789abcdef"}, same_machine=True, close=1e-4
    )
    for change in ({"loss": 0.501}, {"w": "F32 [3] 0123456789abcdef"}, {"decoded": {"q": ["1x drafted: 1 3"]}}):
        assert freeze.differences(old, old | change, same_machine=True, close=1e-4)


def test_tokens_are_compared_in_any_order(freeze):
    old = {"decoded": {"evaluate": {"q": ["1x plain: 1 2", "1x drafted: 1 2"]}}}
    assert (
        freeze.differences(
            old, {"decoded": {"evaluate": {"q": ["1x drafted: 1 2", "1x plain: 1 2"]}}}, same_machine=True
        )
        == []
    )
    (line,) = freeze.differences(old, {"decoded": {"evaluate": {"q": ["1x plain: 1 2"]}}}, same_machine=True)
    assert line.startswith("decoded/evaluate/q/1x drafted: 1 2")


def test_what_the_clock_says_is_left_out(freeze):
    step = {"step": 1, "loss": 0.5, "samples_per_s": 2.0, "time": 3.0}
    assert freeze.cleaned({"metrics": [step], "fingerprint": "a"}) == {"metrics": [{"step": 1, "loss": 0.5}]}


def test_taus_are_named_by_set_and_method(freeze, tmp_path):
    place = {"benchmark": "b", "turn": "", "budget": "3k", "temperature": 0.0, "max_new_tokens": 8, "method": "M"}
    (tmp_path / "report.json").write_text(json.dumps({"cells": [place | {"tau": 2.5, "DSR": 1.3}]}))
    assert freeze.taus_of(tmp_path / "report.json") == {"b | 3k | 0.0 | 8 | M": 2.5}
