"""Device maps and launch lines: the shipped ones fit each other, and others are refused before anything is loaded."""

import re
import shlex

import pytest
from draftsmith.core import ranks
from draftsmith.core.errors import UserError
from draftsmith.recipes.config.files import recipe_names, with_bases
from draftsmith.recipes.config.launch import run_recipe
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from draftsmith.recipes.config.preflight_inputs import check_placement

LARGE = {
    f"{method}-{size}" for method in ("specvlm", "sage")
    for size in ("llava-ov-72b-7b", "qwen2.5-vl-72b-7b", "qwen3-vl-235b-8b")
}  # fmt: skip


def commands(path) -> list[list[str]]:
    """The words of each command in a recipe's header that starts a run."""
    header = [line[1:] for line in path.read_text().splitlines() if line.startswith("#")]
    lines = [line.split("Command:", 1)[1] for line in header if "Command:" in line]
    return [shlex.split(part) for line in lines for part in re.split(r", or |\(and", line) if "recipe=" in part]


def fault(tree: dict, words: list[str]) -> str | None:
    """Why this command is the wrong one for a recipe; None: it is right."""
    program = next(word for word in words if "=" not in word)
    if (tree["target"].get("device_map") or "cpu") != "cpu":
        return None if words[:2] == ["python", "trains/train.py"] else "a launcher hides GPUs or starts several ranks"
    if "--num_accelerators" in words and words[words.index("--num_accelerators") + 1] == "1":
        return "one rank of all: say python"
    return None if program == "deepspeed" else "one rank alone"


@pytest.mark.parametrize("name", sorted(recipe_names()))
def test_the_header_names_the_launcher_that_its_device_map_asks_for(name):
    path = recipe_names()[name]
    found = commands(path)
    assert found, "a recipe says how it is started"
    for words in found:
        assert fault(with_bases(path), words) is None, " ".join(words)
        assert f"recipe={name}" in words


def test_the_six_large_recipes_are_spread():
    spread = {name for name, path in recipe_names().items() if with_bases(path)["target"].get("device_map") == "auto"}
    assert spread == LARGE
    tree = {"target": {"device_map": "auto"}}
    assert fault(tree, shlex.split("deepspeed --num_accelerators 1 trains/train.py recipe=a")), "it can fail"


def two_ranks(monkeypatch) -> None:
    """Whatever group an earlier test has begun in this process."""
    monkeypatch.setattr(ranks, "world_size", lambda: 2)


def test_a_spread_target_is_refused_with_several_ranks(monkeypatch):
    two_ranks(monkeypatch)
    with pytest.raises(UserError, match=r"target\.device_map is auto, and this run has 2 ranks"):
        run_recipe(["recipe=specvlm-llava-ov-72b-7b", "dry_run=true"], "typed")


def test_maps_of_drafters_inside_a_stage_are_told_by_their_key(monkeypatch):
    changes = ["target.device_map=null", "stages.evaluate.methods.SD-Chain.drafter.model.device_map=balanced"]
    loaded = load(["recipe=sage-llava-ov-72b-7b", *changes])
    planned = plan(loaded.recipe, loaded.path)
    check_placement(loaded.recipe, planned)
    two_ranks(monkeypatch)
    with pytest.raises(UserError, match=r"stages\.evaluate\.methods\.SD-Chain\.drafter\.model\.device_map is balanced"):
        check_placement(loaded.recipe, planned)
    check_placement(loaded.recipe, planned, [])  # no stage that loads it


def test_a_host_that_holds_what_is_left_over_needs_a_map(monkeypatch):
    with pytest.raises(UserError, match=r"target\.offload: nothing reads it without a device_map that spreads"):
        load(["recipe=sage-llama3-8b-1b", "target.offload=cpu"])
    assert load(["recipe=sage-llava-ov-72b-7b", "target.offload=cpu"]).recipe.target.offload == "cpu"
