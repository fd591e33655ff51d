"""Recipes that extend others: every shipped one, over several levels, with stages in another order."""

from pathlib import Path

import pytest
from draftsmith.recipes.config.dry_run import dry_run
from draftsmith.recipes.config.files import recipe_names
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from fails import fails_with
from recorded import first_of_each_folder


def written(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return f"recipe={path}"


def extended(name, folder):
    return load([written(folder, name.split("/")[-1], f"extends: {name}\nseed: 7\noutput: runs/mine\n")])


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_can_be_extended(name, tmp_path):
    """Also under its own name; the result is what the shipped recipe is, but for what the file says."""
    shipped = load([f"recipe={name}"]).recipe
    assert extended(name, tmp_path).recipe == shipped.model_copy(update={"seed": 7, "output": "runs/mine"})


@pytest.mark.parametrize("name", first_of_each_folder())
def test_an_extended_recipe_is_planned_as_the_shipped_one(name, tmp_path):
    loaded = extended(name, tmp_path)
    text = dry_run(loaded.recipe, plan(loaded.recipe, loaded.path))
    assert text.count("\nstage ") == len(loaded.recipe.stages) > 0


def test_several_levels_are_merged_nearest_last(tmp_path):
    written(tmp_path, "first", "extends: llava15-160m\nseed: 1\nstages: {finetune: {optim: {lr: 1.0e-5}}}\n")
    written(tmp_path, "second", "extends: first\nseed: 2\n")
    loaded = load([written(tmp_path, "third", "extends: second\noutput: runs/third\n")])
    recipe = loaded.recipe
    assert (recipe.seed, recipe.output) == (2, "runs/third")
    assert recipe.stages["finetune"].optim.lr == 1e-5
    assert recipe.drafter.language_model == "JackFram/llama-160m"


def test_null_takes_what_has_a_name_away(tmp_path):
    """Of stages and methods; a contrast stayed, and was refused for being none."""
    methods = "{P-EAGLE: null, DFlash from distributions: null, 'DFlash from distributions, sampled': null}"
    own = f"{{soft: null, evaluate: {{methods: {methods}, contrasts: {{P-EAGLE less EAGLE-3: null}}}}}}"
    recipe = load([written(tmp_path, "mine", f"extends: demo/dflash\nstages: {own}\n")]).recipe
    evaluate = recipe.stages["evaluate"]
    assert "soft" not in recipe.stages and "P-EAGLE" not in evaluate.methods
    assert "P-EAGLE less EAGLE-3" not in evaluate.contrasts and "DSpark less DFlash" in evaluate.contrasts


def test_circles_are_named(tmp_path):
    written(tmp_path, "a", "extends: b\n")
    written(tmp_path, "b", "extends: c\n")
    fails_with("a circle: a -> b -> c -> a", load, [written(tmp_path, "c", "extends: a\n").replace("c.yaml", "a.yaml")])


ORDERED = "extends: llava15-68m\nstages: {look: {kind: publish}}\norder: [%s]\n"


def test_stages_run_in_the_order_that_is_named(tmp_path):
    mine = written(tmp_path, "mine", ORDERED % "finetune, pretrain, look, evaluate")
    assert list(load([mine]).recipe.stages) == ["finetune", "pretrain", "look", "evaluate"]
    assert "order" not in load([mine]).tree
    # A stage that a later file adds comes after them, and the command line orders last.
    other = written(tmp_path, "other", "extends: mine\nstages: {again: {kind: publish}}\n")
    assert list(load([other]).recipe.stages) == ["finetune", "pretrain", "look", "evaluate", "again"]
    ordered = load([other, "order=[pretrain,finetune,evaluate,look,again]"])
    assert list(ordered.recipe.stages) == ["pretrain", "finetune", "evaluate", "look", "again"]


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ("pretrain, finetune, look", "does not name each stage once"),
        ("pretrain, finetune, look, evaluat", "does not name each stage once"),
        ("pretrain, finetune, look, evaluate, pretrain", "does not name each stage once"),
    ],
)
def test_an_order_names_every_stage_once(order, told, tmp_path):
    fails_with(told, load, [written(tmp_path, "mine", ORDERED % order)])
