"""A head beside another target than its own is refused by what its manifest says, where its weights would load."""

import json

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.targets.anole.section import AnoleTargetConfig
from draftsmith.models.targets.llamagen.section import LlamaGenTargetConfig
from fails import fails_with
from visual_tiny import EAGLE, MEDUSA, anole, llamagen, target


def section(condition="text", *, grid=4, **changes) -> LlamaGenTargetConfig:
    """A recipe's target that has the shape of `llamagen(condition)`."""
    shape = {"num_layers": 2, "num_heads": 2, "dim": 32, "ffn_hidden": 64, "vocab_size": 24, "caption_slots": 6}
    values = {"shape": shape, "condition": condition, "image_size": 16 * grid, "vq": "vq", "path": "org/first"}
    values |= {"text_encoder": "t5" if condition == "text" else None}
    return LlamaGenTargetConfig(kind="llamagen", **(values | changes))


def load(method, folder, teacher, named=None):
    """As an evaluation loads it."""
    identity = None if named is None else TargetIdentity(named.model_dump(mode="json"))
    return method.load(folder, teacher, identity=identity)


def saved(folder, method, named, teacher):
    torch.manual_seed(0)
    method.save(method.build(teacher), folder, {"method": method.kind, "target": named.model_dump(mode="json")})
    return folder


@pytest.mark.parametrize("method", [EAGLE, MEDUSA], ids=["eagle", "medusa"])
def test_a_head_loads_beside_its_own_target(tmp_path, method):
    """Guidance, precision and initial weights are not what a head was made for."""
    teacher = target(llamagen("text"))
    folder = saved(tmp_path, method, section(cfg_scale=3.0), teacher)
    other = section(cfg_scale=7.5, dtype="bfloat16", shape={**section().shape.model_dump(), "dropout": 0.5})
    for named in (None, section(), other):
        load(method, folder, teacher, named)
    method.drafter(load(method, folder, teacher, other), teacher)


@pytest.mark.parametrize("method", [EAGLE, MEDUSA], ids=["eagle", "medusa"])
@pytest.mark.parametrize(("made_for", "problem"), [
    (section("class"), "condition is class, expected text"),
    (section(grid=8), "grid is 8, expected 4"),
    (section(shape={**section().shape.model_dump(), "num_layers": 3}), "num_layers is 3, expected 2"),
    (section(shape={**section().shape.model_dump(), "vocab_size": 30}), "vocab_size is 30, expected 24"),
    (AnoleTargetConfig(kind="anole"), "kind is anole, expected llamagen"),
])  # fmt: skip
def test_a_head_of_another_target_of_one_width_is_refused(tmp_path, method, made_for, problem):
    teacher = target(llamagen("text"))
    caught = fails_with("", load, method, saved(tmp_path, method, made_for, teacher), teacher)
    assert problem in str(caught) and str(tmp_path / "draftsmith.json") in str(caught)
    fails_with("another target", load, method, tmp_path, teacher, section())


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ({"revision": "a"}, {"revision": "b"}, "revision is a, expected b"),
        ({"revision": "a"}, {"revision": None}, None),  # whether it is the same nobody can say
        ({"revision": None}, {"revision": "b"}, None),
        ({"path": "org/first"}, {"path": "org/second"}, "path is org/first, expected org/second"),
        ({"path": "here"}, {"path": "org/second"}, None),  # a directory may be a download, and may have moved
        ({"path": "org/first"}, {"path": "here"}, None),
        ({"path": None}, {"path": "org/second"}, None),
    ],
)
def test_names_and_revisions(tmp_path, monkeypatch, first, second, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    teacher = target(llamagen("text"))
    folder = saved(tmp_path / "head", MEDUSA, section(**first), teacher)
    if problem is None:
        load(MEDUSA, folder, teacher, section(**second))
        return
    caught = fails_with("", load, MEDUSA, folder, teacher, section(**second))
    assert problem in str(caught) and ("fix target.path" in str(caught)) == ("path" in first)


def test_heads_of_anole_and_of_llamagen(tmp_path):
    teacher = anole()
    folder = saved(tmp_path / "anole", MEDUSA, AnoleTargetConfig(kind="anole", revision="a"), teacher)
    load(MEDUSA, folder, teacher, AnoleTargetConfig(kind="anole"))
    with pytest.raises(UserError, match="revision is a, expected b"):
        load(MEDUSA, folder, teacher, AnoleTargetConfig(kind="anole", revision="b"))
    folder = saved(tmp_path / "llamagen", MEDUSA, section(), teacher)
    fails_with("kind is llamagen, expected anole", load, MEDUSA, folder, teacher)


def test_manifests_that_say_nothing_or_nonsense(tmp_path):
    teacher = target(llamagen("text"))
    path = saved(tmp_path, MEDUSA, section(), teacher) / "draftsmith.json"
    for silent in ({}, {"target": "a name"}):
        path.write_text(json.dumps(silent))
        load(MEDUSA, tmp_path, teacher, section())
    for nonsense in ("{", "[]", json.dumps({"target": {"kind": "llamagen", "shape": 3}})):
        path.write_text(nonsense)
        fails_with(r"draftsmith\.json", load, MEDUSA, tmp_path, teacher)
    path.unlink()
    load(MEDUSA, tmp_path, teacher, section())


def test_a_head_on_the_hub_comes_with_its_manifest(tmp_path, monkeypatch):
    """Or in LANTERN's one pickle, which is read without running code."""
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision, set(allow_patterns)))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert EagleConfig(kind="eagle", path="org/head", revision="r").fetched() == tmp_path
    files = {"config.json", "draftsmith.json", "model.safetensors", "pytorch_model.bin", "SHA256SUMS"}
    assert asked == [("org/head", "r", files)]
    assert EagleConfig(kind="eagle", path=str(tmp_path)).fetched() == tmp_path and len(asked) == 1
