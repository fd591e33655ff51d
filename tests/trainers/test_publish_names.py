"""What a publication says without a model: names that engines read, terms that restrict, where drafters are from."""

import pytest
import yaml
from draftsmith.core.errors import UserError
from draftsmith.recipes.load import load
from draftsmith.recipes.schema import TRACKS
from draftsmith.trainers.publishing.licences import chain, licence_of, own_licence, warnings
from draftsmith.trainers.publishing.lineage import WORLD, data_of, trained_by
from draftsmith.trainers.publishing.names import check_name, suggested, taken_for

LLAVA = "llava-hf/llava-1.5-7b-hf"


@pytest.mark.parametrize(
    ("repo", "method"),
    [
        ("me/EAGLE-LLaVA-1.5-7b", "eagle"),
        ("me/EAGLE3-LLaVA-1.5-7b", "eagle3"),
        ("me/llava-1.5-7b-Eagle3", "eagle3"),
        ("me/llava-1.5-7b-sparrow", "sparrow"),
        ("me/llava-1.5-7b-draft-68m", "lvlm"),
    ],
)
def test_names_that_engines_read_rightly(repo, method):
    check_name(repo, method, LLAVA, is_language=True)


@pytest.mark.parametrize(
    ("repo", "method", "found"),
    [
        ("me/eagle-3-llava", "eagle3", "eagle-"),  # looked for before eagle3
        ("me/EAGLE3-eagle-llava", "eagle3", "eagle-"),
        ("me/llava-draft", "eagle3", "eagle3"),
        ("me/EAGLE3-llava", "eagle", "eagle3"),
        ("me/eagle-like-sparrow", "sparrow", "eagle-"),
        ("eagle-lab/llava-draft", "lvlm", "namespace"),
        ("me/llava-dflash", "lvlm", "dflash"),
    ],
)
def test_names_that_engines_take_for_another_method(repo, method, found):
    with pytest.raises(UserError) as caught:
        check_name(repo, method, LLAVA, is_language=True)
    assert found in str(caught.value) and f"/{suggested(method, LLAVA)}" in caught.value.cure


def test_every_suggested_name_is_read_rightly():
    for method in ("lvlm", "sparrow", "msd", "vispec", "hivis", "eagle", "eagle3"):
        check_name(f"me/{suggested(method, LLAVA)}", method, LLAVA, is_language=True)


def test_heads_of_image_generators_may_say_what_they_are():
    check_name("me/EAGLE-LlamaGen-XL", "eagle", None, is_language=False)
    check_name("me/llamagen-xl-head", "eagle", None, is_language=False)
    with pytest.raises(UserError):
        check_name("me/EAGLE3-LlamaGen", "eagle", None, is_language=False)
    assert taken_for("me/medusa-llamagen") is None


@pytest.mark.parametrize("repo", ["llava", "a/b/c", "me/with blank", "me/a--b", "../me/x", "me/" + "x" * 97])
def test_what_the_hub_takes_for_no_name(repo):
    with pytest.raises(UserError, match="NAMESPACE/NAME"):
        check_name(repo, "lvlm", LLAVA, is_language=True)


def test_the_chain_warns_of_what_restricts_and_of_what_is_not_known():
    links = chain([("target", LLAVA), ("initial weights", "JackFram/llama-68m"), ("data", "llava_v1_5_mix665k.json"),
                   ("data", "my own.json")])  # fmt: skip
    assert [link.licence.id for link in links] == ["llama2", "apache-2.0", "cc-by-4.0", None]
    told = warnings(links)
    assert len(told) == 3
    assert "Llama 2" in told[0] and "OpenAI" in told[1] and "not known" in told[2]
    assert own_licence(links, None).id == "llama2" and own_licence(links, "mit").id == "mit"


@pytest.mark.parametrize(
    ("name", "restricts"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", False),
        ("Qwen/Qwen2.5-VL-3B-Instruct", True),
        ("Qwen/Qwen2.5-VL-72B-Instruct", True),
        ("Qwen/Qwen3-VL-8B-Instruct", False),
        ("llava-hf/llava-onevision-qwen2-7b-ov-hf", False),
        ("llava-hf/llava-v1.6-vicuna-13b-hf", True),
        ("GAIR/Anole-7b-v0.1", True),
        ("meta-llama/Llama-3.1-8B-Instruct", True),
    ],
)
def test_known_targets(name, restricts):
    found = licence_of(name)
    assert found.id is not None and bool(found.restricts) is restricts


def test_nothing_is_guessed():
    assert licence_of("somebody/some-model").id is None


def stages_of(recipe: str) -> dict:
    return load([f"recipe={recipe}"], TRACKS).tree["stages"]


@pytest.mark.parametrize(
    ("recipe", "stage", "trained"),
    [
        ("demo/lvlm", "finetune", ["language", "pretrain", "finetune"]),
        ("demo/video", "sparrow", ["sparrow_text", "sparrow"]),
        ("demo/video", "msd", ["msd_text", "msd"]),
        ("demo/visual-ar", "head_without_dropout", ["head_without_dropout"]),
    ],
)
def test_where_a_drafter_is_from(recipe, stage, trained):
    stages = stages_of(recipe)
    assert trained_by(stages, stage) == trained
    # Through cached states, regenerated answers and encoded pictures, down to what the world drew.
    assert data_of(stages, stage) == [WORLD]


def test_files_are_named_without_their_place():
    stages = stages_of("llava15-68m")
    names = [name for stage in trained_by(stages, "finetune") for name in data_of(stages, stage)]
    assert names and not any("/" in name for name in names)


def test_a_drafter_from_scratch_has_no_past():
    stages = yaml.safe_load("{a: {kind: train}, b: {kind: train, from: scratch}, c: {kind: train}}")
    assert trained_by(stages, "c") == ["b", "c"]
