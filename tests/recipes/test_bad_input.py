"""Every mistake in a recipe ends with one readable message, exit code 2, and nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import prints
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config.announce import announcement
from draftsmith.recipes.config.launch import run_recipe
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.run.finished_stages import write_done
from draftsmith.trainers.run.matching import FINGERPRINTS, write_begun
from fails import fails_with
from ranks_run import MAIN, run_ranks
from training import free_port

ROOT = Path(__file__).resolve().parents[2]
BAD = {
    "unknown recipe": (["recipe=llava15-69m"], "llava15-68m"),
    "unknown key": (["recipe=llava15-68m", "stages.pretrain.optim.lrr=1"], "did you mean 'lr'"),
    "unknown top key": (["recipe=llava15-68m", "traget=1"], "did you mean 'target'"),
    "wrong type": (["recipe=llava15-68m", "stages.pretrain.batch_size=many"], "stages.pretrain.batch_size"),
    "out of range": (["recipe=llava15-68m", "stages.pretrain.optim.lr=-1"], "greater than 0"),
    "bare word": (["recipe=llava15-68m", "fast"], "'fast' is not key=value"),
    "no recipe": (["output=x"], "give one recipe"),
    "unknown stage": (["recipe=llava15-68m", "stages=[pretrian]"], "pretrain"),
    "unknown restart": (["recipe=llava15-68m", "restart=finetone"], "finetune"),
    "kind of another target": (["recipe=llava15-68m", "stages.pretrain.kind=encode"], "kinds here are generate"),
    "unknown kind": (["recipe=llava15-68m", "stages.pretrain.kind=trian"], "did you mean 'train'"),
    "stage without a kind": (
        ["recipe=llava15-68m", "stages.new={data: {path: mine.json}}"],
        "stages.new: its kind is missing",
    ),
    "no methods": (["recipe=demo/lvlm-from-nothing", "stages.evaluate.methods=1"], r"(found 1)"),
    "no preset": (
        ["recipe=demo/lvlm-from-nothing", "stages.evaluate.preset=[a]"],
        "stages.evaluate.preset: input should be 'adt'",
    ),
    "needs earlier": (["recipe=demo/lvlm-from-nothing", "stages.target.data.from=evaluate"], "which runs later"),
    "makes no data": (["recipe=demo/lvlm-from-nothing", "stages.language.data.from=target"], "makes none"),
    "unknown scenario": (
        ["recipe=demo/lvlm-from-nothing", "stages.world.splits.train.captoin=1"],
        "did you mean 'caption'",
    ),
    "lora without its part": (["recipe=llava15-68m", "stages.pretrain.lora={rank: 4}"], "does not name language_model"),
    "rule at temperature": (["recipe=llava15-68m", "stages.evaluate.temperature=1.0"], "temperatures: [NUMBER]"),
    "setting of a named drafter": (
        [
            "recipe=demo/lvlm-from-nothing",
            "stages.evaluate.drafters={draft: {kind: lvlm, path: some/draft}}",
            "stages.evaluate.methods={a: {drafter: draft, vata: true}}",
        ],
        "methods.a: vata is no decoding setting of this drafter (kind lvlm",
    ),
    "setting of a stage's drafter": (
        ["recipe=demo/lvlm-from-nothing", "stages.evaluate.methods={a: {drafter: finetune, vata: true}}"],
        "methods.a: vata is no decoding setting of this drafter (kind lvlm",
    ),
    "draw at zero": (["recipe=llava15-68m", "stages.evaluate.methods.M.draw=sample"], "fits none of the temperatures"),
    "fp16 on a CPU": (["recipe=llava15-68m", "engine.precision=fp16"], "fp16"),
    "another tool's name": (
        ["recipe=demo/lvlm-from-nothing", "stages.target.optim.learning_rate=1"],
        "did you mean 'lr'",
    ),
    "another tool's name, by place": (
        ["recipe=demo/lvlm-from-nothing", "stages.target.max_steps=1"],
        "did you mean 'steps'",
    ),
    "joined words": (["recipe=demo/lvlm-from-nothing", "dryrun=true"], "did you mean 'dry_run'"),
    "words in another order": (
        ["recipe=demo/lvlm-from-nothing", "stages.target.optim.ratio_warmup=0"],
        "'warmup_ratio'",
    ),
    "stage of an override": (
        ["recipe=demo/lvlm-from-nothing", "stages.finetoone.steps=2"],
        "did you mean stages.finetune?",
    ),
    "dry_run value": (["recipe=llava15-68m", "dry_run=maybe"], "neither true nor false"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_told_and_nothing_is_written(name, tmp_path, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    arguments, expected = BAD[name]
    message = prints(capsys, arguments, 2)
    assert expected in message and "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("setting", "where"), [
    ("sede=1", "command line: sede=1\n"),
    ("stages.target.optim.learning_rate=1", "command line: stages.target.optim.learning_rate=1\n"),
    ("stages.target.optim={learning_rate: 1}", "command line: stages.target.optim={learning_rate: 1}\n"),
    ("stages.finetoone.steps=2", "command line: stages.finetoone.steps=2\n"),
    (
        "stages.evaluate.temperatures=[0.0,0.0]",
        "command line: stages.evaluate.temperatures=[0.0,0.0]\n",
    ),
])  # fmt: skip
def test_a_mistake_is_blamed_on_who_made_it(tmp_path, capsys, setting, where):
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: demo/lvlm-from-nothing\n")
    assert f"{where}" in prints(capsys, [f"recipe={mine}", setting, "dry_run=true"], 2)
    mine.write_text("extends: demo/lvlm-from-nothing\nsede: 1\n")
    message = prints(capsys, [f"recipe={mine}", "seed=2", "dry_run=true"], 2)
    assert f"where: {mine}\n" in message and "command line" not in message


SECRET = "hf_" + "a1B2" * 9


@pytest.mark.parametrize(("setting", "told"), [
    (f"tracking.tokn={SECRET}", "command line: tracking.tokn="),
    (f"stages.new={{data: {SECRET}, token: {SECRET}}}", "stages.new: its kind is missing"),
])  # fmt: skip
def test_secrets_of_the_command_line_are_not_repeated(setting, told, capsys):
    message = prints(capsys, ["recipe=demo/lvlm-from-nothing", setting, "dry_run=true"], 2)
    assert told in message and SECRET not in message


def test_two_stages_with_one_name(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("target: {}\nstages:\n  a: {kind: train}\n  a: {kind: train}\noutput: x\n")
    fails_with("found duplicate key a", load, [f"recipe={path}"])


def test_extends_goes_one_level_and_kind_changes_drop_old_keys():
    loaded = load(["recipe=llava15-160m"])
    assert loaded.recipe.drafter.language_model == "JackFram/llama-160m"
    assert loaded.recipe.drafter.vision_tower == "openai/clip-vit-large-patch14-336"
    other = load(["recipe=llava15-160m", "target.kind=llava_next", "target.path=llava-hf/llava-v1.6-vicuna-7b-hf"])
    assert other.tree["target"] == {"kind": "llava_next", "path": "llava-hf/llava-v1.6-vicuna-7b-hf"}
    changed = load(["recipe=demo/lvlm-from-nothing", "stages.world.splits.train.caption=7"])
    assert changed.recipe.stages["world"].splits["train"]["caption"] == 7


def test_fingerprints_cover_what_changes_results_and_nothing_else():
    def prints(*overrides):
        loaded = load(["recipe=demo/lvlm-from-nothing", *overrides])
        return {p.name: p.fingerprint for p in plan(loaded.recipe, loaded.path)}

    base = prints()
    assert prints("output=elsewhere", "stages.target.log_every=3", "stages.target.num_workers=2") == base
    changed = prints("stages.pretrain.optim.lr=0.5")
    assert {n for n in base if changed[n] != base[n]} == {"pretrain", "finetune", "evaluate"}
    assert all(changed != base[name] for name, changed in prints("seed=1").items())
    # The synthetic dataset is written without an engine; what trains, and all that builds on it, depends on one.
    changed = prints("engine.precision=bf16")
    assert {n for n in base if changed[n] != base[n]} == {*base} - {"world"}


def test_fingerprints_cover_the_files_that_a_stage_reads(tmp_path):
    """Wherever in the section they are named: training data, benchmarks, validation."""
    files = {name: tmp_path / f"{name}.json" for name in ("finetune", "bench", "val")}
    for path in files.values():
        path.write_text("[]")

    def prints():
        loaded = load(
            [
                "recipe=llava15-68m",
                f"stages.finetune.data.path={files['finetune']}",
                f"stages.finetune.validation={{data: {{path: {files['val']}}}, every: 5}}",
                f"stages.evaluate.benchmarks=[{{name: b, data: {{path: {files['bench']}}}}}]",
            ],
        )
        return {p.name: p.fingerprint for p in plan(loaded.recipe, loaded.path)}

    base = prints()
    for name, stages in {"bench": {"evaluate"}, "val": {"finetune", "evaluate"},
                         "finetune": {"finetune", "evaluate"}}.items():  # fmt: skip
        before = prints()
        files[name].write_text("[{}]")
        after = prints()
        assert {n for n in base if after[n] != before[n]} == stages


WRONG = ("recipe=demo/lvlm-from-nothing", "sede=1")


def test_two_ranks_say_it_once(tmp_path):
    result = run_ranks(2, MAIN, *WRONG, f"output={tmp_path / 'run'}", cwd=ROOT)
    assert [code for code, _ in result] == [2, 2]
    assert "".join(text for _, text in result).count("did you mean 'seed'") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_through_the_real_launcher(tmp_path):
    launcher = ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", free_port()]
    command = [sys.executable, *launcher, "trains/train.py", *WRONG, f"output={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and (done.stdout + done.stderr).count("did you mean 'seed'") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("recipe", "setting", "told"), [
    ("lvlm", "drafter.language_model.num_hidden_layer=4", "drafter.language_model.num_hidden_layer"),
    ("lvlm-from-nothing", "target.vision_tower.hidden_sizes=64", "target.vision_tower.hidden_sizes"),
    ("visual-ar", "target.text_encoder.d_models=32", "target.text_encoder.d_models"),
])  # fmt: skip
def test_a_misspelt_key_of_an_inline_model_is_refused(recipe, setting, told):
    """transformers keeps such a key and reads it nowhere: the model had its default size, and exit code 0."""
    caught = fails_with("", run_recipe, [f"recipe=demo/{recipe}", setting, "dry_run=true"], "a test")
    assert told in caught.problem and "has no such key" in caught.problem
    right = {"num_hidden_layer": "num_hidden_layers", "hidden_sizes": "hidden_size", "d_models": "d_model"}
    assert repr(right[told.split(".")[-1]]) in caught.hint


@pytest.mark.parametrize(("words", "told"), [
    ("recipe=nowhere.yaml", "no file 'nowhere.yaml'"),
    ("recipe=demo/lvlm --dry-run", "write dry_run=true"),
    ("train llava15-68m --dry-run", "write dry_run=true"),
    ("recipe=llava15-68m --seed 1", "write seed=VALUE"),
    ("recipe=llava15-68m stages.finetune.learning_rate=1e-4", "recipes call it lr"),
    ("recipe=llava15-68m stages=pretrain,finetune", 'write "stages=[pretrain,finetune]"'),
    ("help", "draftsmith --help"),
    ("version", "draftsmith --version"),
    ("-v", "draftsmith --version"),
    ("--recipe llava15-68m", "write recipe=VALUE"),
    ("llava15-68m", "draftsmith train llava15-68m"),
    ("logs nowhere.jsonl out", "check its name"),
    ("recipe=demo/lvlm dryrun=true", "did you mean 'dry_run'"),
    ("train llava15-68m stages.pretrain.data.path=${DATA_ROOT}/x.json", "or write ${oc.env:DATA_ROOT,DEFAULT}\n"),
    ("evaluate runs/nothing", "no such folder or recipe: 'runs/nothing'"),
    ("publish runs/nothing", "no such folder or recipe: 'runs/nothing'"),
    ("check runs/nothing", "no such folder or recipe: 'runs/nothing'"),
    ("show runs/nothing", "no such folder or recipe: 'runs/nothing'"),
    ("recipe=demo/lvml", "did you mean 'demo/lvlm'"),
    ("recipe=a recipe=b", "2 recipes: a and b\n  hint:  name one\n"),
    ("seed=1", "recipe=NAME: draftsmith recipes lists them\n"),
    ("train help", "draftsmith COMMAND --help"),
    ("train demo/lvlm llava15-68m", "two recipes: demo/lvlm and llava15-68m"),
    ("train demo/lvlm stages=[pretrain, finetune] seed=1", "without blanks, or in quotes"),
    ("recipe=demo/lvlm llava15-68m", "name one recipe; settings are key=value\n"),
    ("train demo/lvlm restart=nothing", "restart=nothing\n  hint:  known names: evaluate, finetune, "),
    ("train demo/lvlm restart=pretran", "did you mean 'pretrain'?"),
    ("recipe=demo/lvlm stages.evaluate.methods.M.tree=30-4", "hint:  did you mean"),
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


def test_a_runs_folder_is_no_recipe_and_its_command_is_told(tmp_path, capsys):
    assert f"recipe={tmp_path}/recipe.yaml output={tmp_path}\n" in prints(capsys, [f"recipe={tmp_path}"], 2)


@pytest.mark.parametrize("words", ["restart=nothing", "stages=[nothing]", "dry_run=maybe", "b"])
def test_nothing_is_announced_before_words_that_are_refused(words):
    assert announcement(["recipe=demo/lvlm", words]) is None


def test_whose_folder_it_is_comes_first(tmp_path, monkeypatch, capsys):
    """It listed keys and said "and 81 more"; the cure that it named first would have set the other run aside."""
    loaded = load(["recipe=demo/lvlm", f"output={tmp_path}"])
    (tmp_path / "run.yaml").write_text("command: draftsmith demo\nrecipe: lvlm.yaml\n")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(loaded.tree, sort_keys=False))
    for stage in plan(loaded.recipe, loaded.path):
        (tmp_path / stage.name).mkdir()
        write_begun(stage, tmp_path / stage.name)
        write_done(stage, tmp_path / stage.name, FINGERPRINTS, 1.0)
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: demo/lvlm\nseed: 5\n")
    monkeypatch.setattr(
        "draftsmith.trainers.run.guard.RunLock", lambda *words, **how: None
    )  # held until a process ends
    said = prints(capsys, ["evaluate", str(mine), f"output={tmp_path}"], 2)
    assert said.startswith("error: this folder holds a run of lvlm.yaml, and this is mine.yaml: ")
    assert "hint:  choose another output: output=FOLDER; or," in said and "restart=" in said
    assert main(["evaluate", "demo/lvlm", f"output={tmp_path}", "seed=5"]) == 2, "its own recipe with another setting"
    assert capsys.readouterr().err.startswith("error: stage evaluate was run")


def test_a_refused_name_is_not_suggested(capsys):
    words = ["recipe=demo/compare", "dry_run=true", "stages.evaluate.methods.MSD, tree.drafter=MSD, tree"]
    said = prints(capsys, words, 2)
    assert "which is no earlier stage" in said and "'MSD, tree'" not in said[said.index("hint:") :]
