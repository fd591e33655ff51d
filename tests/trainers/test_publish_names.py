"""What a publication says without a model: names that engines read, terms that restrict, where drafters are from."""

from pathlib import Path

import pytest
import yaml
from draftsmith.models.drafters import EagleConfig, LvlmConfig
from draftsmith.recipes.config.files import recipe_names
from draftsmith.recipes.config.load import load
from draftsmith.trainers.publish.hub_upload import check_name, is_repo, suggested
from draftsmith.trainers.publish.lineage import (
    SYNTHETIC_DATASET,
    began_as,
    chain,
    data_of,
    licence_of,
    own_licence,
    trained_by,
    warnings,
)
from fails import fails_with

LLAVA = "llava-hf/llava-1.5-7b-hf"


@pytest.mark.parametrize(("repo", "method", "found"), [
    ("me/eagle-3-llava", "eagle3", "eagle-"),  # looked for before eagle3
    ("me/EAGLE3-eagle-llava", "eagle3", "eagle-"),
    ("me/llava-draft", "eagle3", "eagle3"),
    ("me/EAGLE3-llava", "eagle", "eagle3"),
    ("me/eagle-like-sparrow", "sparrow", "eagle-"),
    ("eagle-lab/llava-draft", "lvlm", "namespace"),
    ("me/llava-dflash", "lvlm", "dflash"),
])  # fmt: skip
def test_names_that_engines_take_for_another_method(repo, method, found):
    caught = fails_with("", check_name, repo, method, LLAVA, is_language=True)
    assert found in str(caught) and f"/{suggested(method, LLAVA)}" in caught.hint


@pytest.mark.parametrize("repo", ["llava", "a/b/c", "me/with blank", "me/a--b", "../me/x", "me/" + "x" * 97])
def test_what_the_hub_takes_for_no_name(repo):
    assert not is_repo(repo)


def test_the_chain_warns_of_what_restricts_and_of_what_is_not_known():
    links = chain([("target", LLAVA), ("initial weights", "JackFram/llama-68m"), ("data", "llava_v1_5_mix665k.json"),
                   ("data", "my own.json")])  # fmt: skip
    assert [link.licence.id for link in links] == ["llama2", "apache-2.0", "cc-by-4.0", None]
    told = [*warnings(links)]
    assert len(told) == 3
    assert "Llama 2" in told[0] and "OpenAI" in told[1] and "not known" in told[2]
    assert own_licence(links, None).id == "llama2" and own_licence(links, "mit").id == "mit"


@pytest.mark.parametrize(("name", "restricts"), [
    ("Qwen/Qwen2.5-VL-7B-Instruct", False), ("Qwen/Qwen2.5-VL-3B-Instruct", True),
    ("Qwen/Qwen2.5-VL-72B-Instruct", True), ("Qwen/Qwen3-VL-8B-Instruct", False),
    ("llava-hf/llava-onevision-qwen2-7b-ov-hf", False), ("llava-hf/llava-v1.6-vicuna-13b-hf", True),
    ("GAIR/Anole-7b-v0.1", True), ("meta-llama/Llama-3.1-8B-Instruct", True),
])  # fmt: skip
def test_known_targets(name, restricts):
    result = licence_of(name)
    assert result.id is not None and bool(result.restricts) is restricts


@pytest.mark.parametrize("name", [
    "somebody/some-model", "me/my-llamagen", "jadohu/llamagen_drafter", "chameleons.json", "lmsys/vicuna-7b-v1.3",
])  # fmt: skip
def test_nothing_is_guessed(name):
    assert licence_of(name).id is None and [*warnings(chain([("target", name)]))]


def test_targets_of_the_recipes_are_known_or_warned_of():
    trees = [yaml.safe_load(path.read_text()) for path in recipe_names().values()]
    named = {tree["target"]["path"] for tree in trees if (tree.get("target") or {}).get("path")}
    named = {name if name.count("/") == 1 and not name.startswith("models/") else Path(name).name for name in named}
    assert len(named) > 12
    unknown = {"llava-hf/llava-onevision-qwen2-72b-ov-hf", "OpenGVLab/InternVL3-8B-hf"}
    assert {name for name in named if licence_of(name).id is None} == unknown


def test_whose_weights_it_began_with(tmp_path):
    """A directory's are somebody's, too; of those nothing is known."""
    (tmp_path / "mine").mkdir()
    draft = LvlmConfig(kind="lvlm", language_model=str(tmp_path / "mine"), vision_tower="target")
    assert began_as(draft, "language_model", "path") == ["mine"] and began_as(draft, "vision_tower") == []
    head = EagleConfig(kind="eagle", path="jadohu/llamagen_drafter")
    assert began_as(head, "language_model", "path") == ["jadohu/llamagen_drafter"]


@pytest.mark.parametrize(("recipe", "stage", "trained"), [
    ("demo/lvlm", "finetune", ["language", "pretrain", "finetune"]),
    ("demo/video", "sparrow", ["sparrow_text", "sparrow"]),
    ("demo/video", "msd", ["msd_text", "msd"]),
    ("demo/visual-ar", "head_without_dropout", ["head_without_dropout"]),
])  # fmt: skip
def test_where_a_drafter_is_from(recipe, stage, trained):
    stages = load([f"recipe={recipe}"]).tree["stages"]
    assert trained_by(stages, stage) == trained
    # Through cached states, regenerated answers and encoded pictures, down to what the synthetic dataset drew.
    assert data_of(stages, stage) == [SYNTHETIC_DATASET]


@pytest.mark.parametrize(("kind", "name"), [
    ("hydra_pkg.heads:HydraConfig", "llava-1.5-7b-hydra-draft"),
    ("hydra_pkg:Heads.Config", "llava-1.5-7b-config-draft"),
    ("pkg.heads:MyEagleConfig", "llava-1.5-7b-draft"),  # engines would take it for EAGLE
])  # fmt: skip
def test_a_class_of_another_package_is_suggested_a_name_that_the_hub_takes(kind, name):
    assert suggested(kind, LLAVA) == name
    check_name(f"me/{name}", kind, LLAVA, is_language=True)
    assert is_repo(f"me/{name}")
