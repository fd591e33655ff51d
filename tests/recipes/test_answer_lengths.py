"""An answer longer than the target's positions stops a dry run, whichever stage would write it."""

import re

import pytest
from command_line import prints
from draftsmith.recipes.commands.cli import main


@pytest.mark.parametrize(("recipe", "setting", "key", "positions"), [
    ("demo/lvlm-from-nothing", "stages.evaluate.max_new_tokens=512", "evaluate.max_new_tokens", "512"),
    ("demo/lvlm-from-nothing", "stages.evaluate.max_new_tokens=[40, 5000]", "evaluate.max_new_tokens", "512"),
    ("demo/lvlm-distilled", "stages.answers.max_new_tokens=512", "answers.max_new_tokens", "512"),
    ("demo/suite", "stages.suite.benchmarks.suite.quality.max_new_tokens=100000",
     "suite.benchmarks.suite.quality.max_new_tokens", None),
    ("demo/lvlm-from-nothing", "stages.target.positions=64 stages.target.data.max_length=64 "
     "stages.evaluate.max_new_tokens=64", "evaluate.max_new_tokens", "64"),
    ("sparrow-qwen2.5-vl-7b", "stages.evaluate.max_new_tokens=128000", "evaluate.max_new_tokens", "128,000"),
    ("sparrow-ablation-qwen2.5-vl-7b", "stages.layers.probes.importance.max_new_tokens=128000",
     "layers.probes.importance.max_new_tokens", "128,000"),
    ("eagle3-qwen2.5-vl-7b", "stages.text.validation={every: 100} stages.text.decoding={every: "
     "100, tree: {kind: chain, gamma: 3}, data: {path: a.json}, max_new_tokens: 128000}",
     "text.decoding.max_new_tokens", "128,000"),
    ("eagle3-qwen2.5-vl-7b", "stages.evaluate.max_new_tokens=1000000", "evaluate.max_new_tokens", "128,000"),
])  # fmt: skip
def test_a_dry_run_stops(recipe, setting, key, positions, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = prints(capsys, [f"recipe={recipe}", *re.split(r" (?=stages\.)", setting), "dry_run=true"], 2)
    assert f"stages.{key} is " in said and "positions for a prompt and its answer" in said, said
    assert "where: command line: stages." in said and "hint:  write at most" in said
    assert positions is None or f"the target has {positions} positions" in said


@pytest.mark.parametrize("stage", ["evaluate", "draft.validation.decoding"])
def test_pictures_have_their_own_number_of_codes(stage, capsys):
    assert main(["recipe=demo/visual-ar", f"stages.{stage}.max_new_tokens=4", "dry_run=true"]) == 2
    assert "max_new_tokens" in capsys.readouterr().err
