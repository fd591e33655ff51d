"""Dry runs say what an evaluation takes of a GPU, and end with 1 where it does not fit."""

import pytest
from draftsmith.recipes.dry_run import does_not_fit
from draftsmith.recipes.launch import run_recipe
from draftsmith.recipes.load import load, recipe_names
from draftsmith.recipes.plan import plan

SAGE = ["recipe=sage-qwen2.5-vl-72b-7b", "dry_run=true"]
TOGETHER = ["target.device_map=null", "target.tensor_parallel_size=8"]


def test_every_shipped_recipe_fits_its_own_hardware():
    declared = set()
    for name in recipe_names():
        loaded = load([f"recipe={name}"])
        planned = plan(loaded.recipe, loaded.path)
        assert does_not_fit(loaded.recipe, planned) == [], name
        if loaded.recipe.hardware is not None:
            declared.add(name)
            assert any(one.stage.memory(one) is not None for one in planned), f"{name}: nothing reads it"
    assert {"llava15-68m", "tabed-sweep", "sparrow-qwen3-vl-8b", "specvlm-qwen3-vl-235b-8b"} <= declared


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ([], 0, "fits 8 GPU(s) of 80 GB each"),
        (TOGETHER, 0, "embedding, whole 2.3"),
        (["target.device_map=null"], 1, "DOES NOT FIT 8 GPU(s) of 80 GB each"),
        ([*TOGETHER, "hardware.memory_gb=24"], 1, "does not fit the recipe's hardware: stage evaluate"),
        (["hardware=null"], 0, "memory of the fullest GPU about 171"),
    ],
)
def test_what_does_not_fit_ends_with_1(settings, code, said, capsys):
    assert run_recipe([*SAGE, *settings], "the command") == code
    text = capsys.readouterr().out
    assert said in text and "sibling 17.3" in text


def test_a_target_that_cannot_be_cut_is_refused_by_the_dry_run():
    with pytest.raises(Exception, match="num_attention_heads is 64, which 3 ranks"):
        run_recipe([*SAGE, "target.device_map=null", "target.tensor_parallel_size=3"], "the command")
