"""Every mistake in a recipe ends with one readable message, exit code 2, and nothing written."""

import os
from pathlib import Path

import pytest
from command_line import prints
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config.load import load
from ranks_run import MAIN, run_ranks

ROOT = Path(__file__).resolve().parents[2]


SECRET = "hf_" + "a1B2" * 9


@pytest.mark.parametrize(("setting", "told"), [
    (f"tracking.tokn={SECRET}", "command line: tracking.tokn="),
    (f"stages.new={{data: {SECRET}, token: {SECRET}}}", "stages.new: its kind is missing"),
])  # fmt: skip
def test_secrets_of_the_command_line_are_not_repeated(setting, told, capsys):
    message = prints(capsys, ["recipe=demo/lvlm-from-nothing", setting, "dry_run=true"], 2)
    assert told in message and SECRET not in message


def test_kind_changes_drop_old_keys():
    other = load(["recipe=llava15-160m", "target.kind=llava_next", "target.path=llava-hf/llava-v1.6-vicuna-7b-hf"])
    assert other.tree["target"] == {"kind": "llava_next", "path": "llava-hf/llava-v1.6-vicuna-7b-hf"}
    changed = load(["recipe=demo/lvlm-from-nothing", "stages.world.splits.train.caption=7"])
    assert changed.recipe.stages["world"].splits["train"]["caption"] == 7


WRONG = ("recipe=demo/lvlm-from-nothing", "sede=1")


def test_two_ranks_say_it_once(tmp_path):
    result = run_ranks(2, MAIN, *WRONG, f"output={tmp_path / 'run'}", cwd=ROOT)
    assert [code for code, _ in result] == [2, 2]
    assert "".join(text for _, text in result).count("did you mean 'seed'") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("words", "told"), [
    ("recipe=nowhere.yaml", "no recipe 'nowhere.yaml'"),
    ("recipe=llava15-69m", "llava15-68m"),
    ("output=x", "give one recipe"),
    ("recipe=llava15-68m fast", "'fast' is not key=value"),
    ("recipe=demo/lvlm --dry-run", "dry_run=true"),
    ("recipe=llava15-68m dry_run=maybe", "dry_run: input should be a valid boolean"),
    ("recipe=llava15-68m stages=pretrain,finetoone", "did you mean 'finetune'?"),
    ("recipe=llava15-68m stages=[pretrian]", "pretrain"),
    ("train demo/lvlm restart=pretran", "did you mean 'pretrain'?"),
    ("-v", "'-v' is not key=value"),
    ("trian demo/lvlm", "did you mean 'train'"),
    ("train", "arguments are required: NAME"),
    ("train demo/lvlm --restart", "unrecognized arguments: --restart"),
    ("train demo/lvlm recipe=llava15-68m", "2 recipes: demo/lvlm and llava15-68m"),
    ("train llava15-68m stages.pretrain.data.path=${DATA_ROOT}/x.json", "or ${oc.env:DATA_ROOT,DEFAULT}\n"),
    ("train demo/lvlm stages=[pretrain, finetune] seed=1", "without blanks, or in quotes"),
    ("evaluate runs/nothing", "no recipe 'runs/nothing'"),
    ("recipe=a recipe=b", "2 recipes: a and b\n"),
    ("logs nowhere.jsonl out", "file not found\n  where: nowhere.jsonl"),
    ("doctor --ranks 0", "1 or more"),
    ("compare nowhere/run", "no such folder"),
    ("demo vidoe", "did you mean 'video'"),
    ("import a b --as eagel --target c", "did you mean 'eagle'"),
    ("import a b --as eagle", "--target is missing"),
    ("verify nowhere/folder", "is no directory, and cannot be fetched"),
    ("verify f --target traget=x", "did you mean 'target'"),
    ("verify f --target x --target target=y", "target is named twice"),
])  # fmt: skip
def test_the_cure_that_is_named_is_one(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda *call: pytest.fail("a launcher was started for it"))
    said = prints(capsys, words.split(), 2)
    assert told in said and not any(tmp_path.iterdir())
    assert len(said) < 700, "a wall of names"


def test_a_variable_of_the_environment_in_a_file_is_told_how_it_is_written(tmp_path, capsys):
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: demo/lvlm\noutput: ${DATA_ROOT}/x\n")
    assert main([f"recipe={mine}"]) == 2 and "${oc.env:DATA_ROOT,DEFAULT}" in capsys.readouterr().err
