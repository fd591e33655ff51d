"""Dry runs say what an evaluation takes of a GPU, and end with 1 where it does not fit."""

import re
from dataclasses import replace
from typing import ClassVar, Literal

import pytest
from draftsmith.models.drafters.base import PublishedDrafter
from draftsmith.models.families.sizes import parameter_counts
from draftsmith.recipes.dry_run import does_not_fit
from draftsmith.recipes.launch import run_recipe
from draftsmith.recipes.load import load, recipe_names
from draftsmith.recipes.plan import plan
from draftsmith.trainers.estimate.models import target_shape
from draftsmith.trainers.estimate.train_memory import engine_parts, micro_of
from recorded import recorded_dry_run

SAGE = ["recipe=sage-qwen2.5-vl-72b-7b", "dry_run=true"]
TOGETHER = ["target.device_map=null", "target.tensor_parallel_size=8"]


def test_every_shipped_recipe_fits_its_own_hardware():
    """By the recorded dry runs, which tests/test_goldens.py makes anew."""
    declared = set()
    for name in recipe_names():
        text = recorded_dry_run(name)
        assert "exit code" not in text and "does not fit" not in text.lower(), name
        if load([f"recipe={name}"]).recipe.hardware is not None:
            declared.add(name)
            assert re.search(r"fits \d+ GPU\(s\) of \d+ GB each", text), f"{name}: nothing reads it"
    assert {"llava15-68m", "tabed-sweep", "sparrow-qwen3-vl-8b", "specvlm-qwen3-vl-235b-8b"} <= declared


def test_headers_agree_with_the_dry_runs():
    """A header's size of GPUs is the recipe's `hardware`; where it has none, everything fits GPUs of that size."""
    read = 0
    for name, path in recipe_names().items():
        match = re.search(r"^# Hardware.*?(one GPU|a GPU|GPUs).*?(\d+) GB", path.read_text(), re.MULTILINE)
        if match is None:
            continue
        read, hardware, size = read + 1, load([f"recipe={name}"]).recipe.hardware, int(match[2])
        if hardware is not None:
            assert hardware.memory_gb == size, name
            continue
        gpus = 8 if match[1] == "GPUs" else 1
        loaded = load([f"recipe={name}", f"hardware={{gpus: {gpus}, memory_gb: {size}}}"])
        assert does_not_fit(loaded.recipe, plan(loaded.recipe, loaded.path)) == [], name
    assert read >= 10


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ([], 0, "fits 8 GPU(s) of 80 GB each"),
        (TOGETHER, 0, "embedding, whole 2.3"),
        (["target.device_map=null"], 3, "DOES NOT FIT 8 GPU(s) of 80 GB each"),
        ([*TOGETHER, "hardware.memory_gb=24"], 3, "does not fit the recipe's hardware: stage evaluate"),
        (["hardware=null"], 0, "memory of the fullest GPU about 182"),
    ],
)
def test_what_does_not_fit_ends_with_3(settings, code, said, capsys):
    assert run_recipe([*SAGE, *settings], "the command") == code
    text = capsys.readouterr().out
    assert said in text and "sibling 15.4, drafters' caches 9.6" in text


def test_a_target_that_cannot_be_cut_is_refused_by_the_dry_run():
    with pytest.raises(Exception, match="num_attention_heads is 64, which 3 ranks"):
        run_recipe([*SAGE, "target.device_map=null", "target.tensor_parallel_size=3"], "the command")


def test_an_evaluation_holds_its_draft_lvlm():
    """Llama-68M, its CLIP tower and projector in bfloat16, once; a method has a cache for each mode that it mixes."""
    parts = []
    for mode in ("T", "MT"):
        loaded = load(["recipe=llava15-68m", f"stages.evaluate.methods.T.mode={mode}"])
        one = next(one for one in plan(loaded.recipe, loaded.path) if one.name == "evaluate")
        parts.append(one.stage.memory(one).parts)
    beside = loaded.recipe.drafter.config_beside(target_shape(loaded.recipe))
    assert (
        parts[0]["draft LVLMs"] == parts[1]["draft LVLMs"] == 2 * sum(parameter_counts(beside).values()) > 0.6 * 2**30
    )
    # The graph of a chain of five has the scores of each mode in float32, too.
    cache = parts[1]["drafters' caches"] - parts[0]["drafters' caches"] - 4 * 5 * 32064
    # Of 32 layers of 4,096 in the target and two of 768 in the draft, whose places leave out the tree's root.
    positions = parts[0]["key-value cache"] / (2 * 2 * 32 * 4096)
    assert cache == (positions - 1) * (2 * 2 * 2 * 768)


def test_graphs_of_heads_hold_a_cache_of_a_bucket_and_what_they_propose():
    caches = []
    for value in ("false", "true", "auto"):
        loaded = load(["recipe=eagle-llava15-7b", f"stages.evaluate.graphs.head={value}"])
        one = next(one for one in plan(loaded.recipe, loaded.path) if one.name == "evaluate")
        caches.append(one.stage.memory(one).on_gpu["drafters' caches"])
    assert caches[1] == caches[2]
    # A distribution over 32,064 ids at least, in float32, for each of ten numbers of nodes at one length.
    assert caches[1] - caches[0] > 4 * 32064 * 50


def test_two_stages_drafts_of_one_section_are_held_both():
    """The distilled draft and the one that it began as have one section, and weights of their own."""
    found = {}
    for name in ("llava15-68m", "llava15-68m-distilled"):
        loaded = load([f"recipe={name}"])
        one = next(one for one in plan(loaded.recipe, loaded.path) if one.name == "evaluate")
        found[name] = one.stage.memory(one).parts
    assert found["llava15-68m-distilled"]["draft LVLMs"] == 2 * found["llava15-68m"]["draft LVLMs"]


# ---- trainings


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
        (["recipe=eagle-anole-7b", "hardware={gpus: 8, memory_gb: 16}"], "frozen target 13.1", "head, evaluate"),
        (["recipe=eagle-llamagen-xl-stage1", "hardware={gpus: 1, memory_gb: 4}", "stages=[evaluate]"],
         "target's text encoder 2.3", "evaluate"),
    ],
)  # fmt: skip
def test_a_training_or_a_generator_that_does_not_fit_ends_with_3(settings, said, stages, capsys):
    assert run_recipe([*settings, "dry_run=true"], "the command") == 3
    text = capsys.readouterr().out
    assert said in text and text.rstrip().endswith(f"does not fit the recipe's hardware: stage {stages}")


def test_what_a_step_keeps_grows_with_its_rows_and_shrinks_with_checkpointing(capsys):
    activations = []
    for setting in ("micro_batch_size=16", "micro_batch_size=8", "gradient_checkpointing=false"):
        run_recipe(["recipe=llava15-160m", "dry_run=true", "stages=[finetune]", f"stages.finetune.{setting}"], "c")
        text = capsys.readouterr().out
        activations.append(float(text.split("activations ")[1].split(",")[0]))
    assert activations[0] == pytest.approx(2 * activations[1], abs=0.11) and activations[2] > 3 * activations[0]
