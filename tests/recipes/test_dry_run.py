"""Dry runs: full-size recipes load and count right without a network, and say what a training step takes of a GPU."""

import json
import re
from dataclasses import replace
from typing import ClassVar, Literal

import pytest
import torch
from command_line import prints
from draftsmith.models.drafters.base import PublishedDrafter
from draftsmith.models.hub import pinned_config
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config.files import recipe_names
from draftsmith.recipes.config.launch import run_recipe
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.estimate.train_memory import engine_parts, micro_of
from recorded import recorded_dry_run
from safetensors.torch import save_file
from small_records import talk

SAGE = ["recipe=sage-qwen2.5-vl-72b-7b", "dry_run=true"]


def test_it_says_what_is_recorded_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown, expected = prints(capsys, ["recipe=llava-ov-68m", "dry_run=true"]), recorded_dry_run("llava-ov-68m")
    stages = [line for line in expected.splitlines() if line.startswith("stage ")]
    assert stages and [line for line in shown.splitlines() if line.startswith("stage ")] == stages
    assert list(tmp_path.iterdir()) == []


def test_data_on_disk_replaces_what_was_declared(capsys, tmp_path):
    def record(picture):
        turns = talk(f"{'<image> ' * picture}what is it", "a cat")
        return {"id": str(picture), "conversations": turns} | ({"image": "a.png"} if picture else {})

    path = tmp_path / "data.json"
    path.write_text(json.dumps([record(True), record(False), record(True)]))
    shown = prints(capsys, ["recipe=llava15-68m", "dry_run=true", f"stages.finetune.data.path={path}"])
    assert "samples 3 (measured)" in shown
    assert "an epoch has 17 words of text and 1,152 visual tokens (measured)" in shown
    assert "steps 1 at batch 128" in shown and sorted(tmp_path.iterdir()) == [path]


def test_auto_of_weights_on_this_disk_is_what_they_are_stored_in(capsys, tmp_path):
    """And their memory is counted so."""
    shown = []
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        save_file({"w": torch.zeros(4, dtype=dtype)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "llava", **pinned_config("llava-1.5-7b-hf")}))
        words = [
            "recipe=eagle-llava15-7b",
            "dry_run=true",
            "stages=[text]",
            f"target.path={folder}",
            "target.dtype=auto",
        ]
        assert main(words) == 0
        shown.append(capsys.readouterr().out)
    assert "dtype auto (float32: as stored; float32 on a CPU)" in shown[0] and "frozen target 26.3" in shown[0]
    assert "dtype auto (bfloat16: as stored; float32 on a CPU)" in shown[1] and "frozen target 13.2" in shown[1]


def test_every_shipped_recipe_fits_its_own_hardware():
    """By the recorded dry runs, which tests/test_goldens.py makes anew."""
    declared = set()
    for name in recipe_names():
        text = recorded_dry_run(name)
        assert "exit code" not in text and "does not fit" not in text.lower(), name
        if load([f"recipe={name}"]).recipe.hardware is not None:
            declared.add(name)
            assert re.search(r"fits \d+ GPU\(s\) of \d+ GB each", text), f"{name}: nothing reads it"
    assert {"llava15-68m", "sparrow-qwen3-vl-8b"} <= declared


def test_a_target_that_cannot_be_cut_is_refused_by_the_dry_run():
    with pytest.raises(Exception, match="num_attention_heads is 64, which 3 ranks"):
        run_recipe([*SAGE, "target.device_map=null", "target.tensor_parallel_size=3"], "the command")


@pytest.mark.parametrize(
    ("zero", "precision", "weights", "gradients", "optimizer"),
    [
        (0, "fp32", 4000, 1600, 3200),
        (0, "bf16", 2000, 800, 4800),
        (1, "bf16", 2000, 1600, 600),
        (2, "bf16", 2000, 200, 600),
        (3, "bf16", 250, 200, 600),
        (3, "fp32", 500, 200, 400),
    ],
)
def test_weights_gradients_and_optimizer_by_zero_stage(zero, precision, weights, gradients, optimizer):
    """Of 1,000 parameters of which 400 learn, on eight ranks: one micro-batch each."""
    settings = [f"engine={{zero_stage: {zero}, precision: {precision}}}", "stages.pretrain.micro_batch_size=32"]
    recipe = load(["recipe=llava15-68m", *settings]).recipe
    stage = recipe.stages["pretrain"]
    assert micro_of(stage, recipe) * recipe.hardware.gpus == stage.batch_size
    parts = engine_parts(1000, 400, stage, recipe)
    assert parts == {"weights": weights, "gradients": gradients, "optimizer": optimizer}


class NewDrafter(PublishedDrafter):
    """As the first version of somebody's own: it builds no module on the meta device."""

    kind: Literal["new"] = "new"
    trains_on: ClassVar[str | None] = "states"

    def count(self, shape):
        return {"trainable": 10**9}


@pytest.mark.parametrize(("name", "stage"), [("eagle3-qwen2.5-vl-7b", "text"), ("eagle-anole-7b", "head")])
def test_what_cannot_be_counted_is_named(name, stage):
    loaded = load([f"recipe={name}"])
    one = next(one for one in plan(loaded.recipe, loaded.path) if one.name == stage)
    known, new = one.stage.memory(one), one.stage.model_copy(update={"drafter": NewDrafter()})
    memory = new.memory(replace(one, stage=new))
    assert memory.parts["frozen target"] == known.parts["frozen target"] and "activations" in known.parts
    assert "activations" not in memory.parts and memory.parts["weights"] == 2e9
    assert "not counted: activations of new (it builds no module without weights)" in memory.lines(None)[0]
    assert "not counted" not in known.lines(None)[0]


@pytest.mark.parametrize(
    ("settings", "said", "stages"),
    [
        (["recipe=llava15-68m", "hardware.memory_gb=10", "stages=[pretrain,finetune]"], "activations 10.2", "pretrain"),
        (["recipe=eagle-llava15-7b", "hardware.memory_gb=16", "stages=[text]"], "frozen target 13.2", "text"),
        (["recipe=eagle-anole-7b", "hardware={gpus: 8, memory_gb: 16}"], "frozen target 13.1", "head"),
    ],
)  # fmt: skip
def test_a_training_that_does_not_fit_ends_with_3(settings, said, stages, capsys):
    assert run_recipe([*settings, "dry_run=true"], "the command") == 3
    text = capsys.readouterr().out
    assert said in text and text.rstrip().endswith(f"does not fit the recipe's hardware: stage {stages}")
