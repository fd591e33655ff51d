"""Folders of hidden-state heads: what is written, and what is refused beside another target or with other settings."""

import json

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.head_config import TEXT_STAGE
from draftsmith.models.drafters.head_files import manifest_of, save_head
from heads_tiny import SETTINGS, STRETCHED, built, case_for, config_of, outputs, stretched_text, tables
from safetensors.torch import load_file, save_file
from tensors import same_weights

MADE_FOR = TargetIdentity({"path": "org/model", "revision": "a"}, "t")


def saved(name, folder, **more):
    config, target, training = built(name)
    config.save(training.head, folder, manifest_of(config, target.shape, MADE_FOR, **more))
    return config, target, training


@pytest.mark.parametrize("name", SETTINGS)
def test_round_trip(name, tmp_path):
    config, target, training = saved(name, tmp_path, step=7)
    head = config.load(tmp_path, target, identity=TargetIdentity({"path": "org/model"}, "t"))
    state = training.head.state_dict()
    assert same_weights(head, state) and same_weights(state, load_file(tmp_path / "model.safetensors"))
    assert not any("embed" in n for n in state)
    batch, states = case_for(config, target)
    again = config.training_objective(head, target).eval()
    assert torch.equal(again(batch, states).loss_sum, training(batch, states).loss_sum)
    assert same_weights(config.copy_of(head, state), state)
    assert json.loads((tmp_path / "draftsmith.json").read_text())["step"] == 7


def test_the_manifest_says_what_was_read(tmp_path):
    saved("sparrow", tmp_path)
    manifest = json.loads((tmp_path / "draftsmith.json").read_text())
    assert manifest["reads"]["state"] == "feature" and manifest["reads"]["visual_layer"] == 4
    assert manifest["reads"]["visual_slots"] == "direct" and "0 is the embedding" in manifest["reads"]["numbering"]
    assert manifest["positions"] == {"kind": "compact", "gap_share": 0.0, "gap": 32768}
    assert manifest["tokenizer_sha256"] == "t" and manifest["target"]["revision"] == "a"
    saved("eagle3-middle", tmp_path / "b")
    reads = json.loads((tmp_path / "b" / "draftsmith.json").read_text())["reads"]
    assert (reads["state"], reads["visual_embedding"]) == ([2, 4, 5], "projected")


@pytest.mark.parametrize(("changes", "identity", "says"), [
    ({"middle_layer": 5}, None, "visual_layer is 4, expected 5"),
    ({"state": -2}, None, r"state is feature, expected \[7\]"),
    ({"ivsb": False}, None, "ivsb is True, expected False"),
    ({"input_norm": False}, None, "input_norm is True, expected False"),
    ({}, TargetIdentity({}, "other"), "tokenizer_sha256 is t, expected other"),
    ({}, TargetIdentity({"path": "org/another"}), "target.path is org/model, expected org/another"),
    ({}, TargetIdentity({"path": "org/model", "revision": "b"}), "target.revision is a, expected b"),
])  # fmt: skip
def test_a_head_of_another_making_is_refused(changes, identity, says, tmp_path):
    _, target, _ = saved("sparrow", tmp_path)
    config = config_of(**SETTINGS["sparrow"] | changes)
    with pytest.raises(UserError, match=says):
        config.load(tmp_path, target, identity=identity)


def test_settings_of_decoding_may_differ(tmp_path):
    _, target, _ = saved("sparrow", tmp_path)
    share = {"visual_share": 0.5, "vata": False}
    for changes in ({"vata": False}, {"positions": "flat"}, {"positions": "mrope"}, share):
        config_of(**SETTINGS["sparrow"] | changes).load(tmp_path, target)


def test_published_files(tmp_path):
    """No manifest, the target's rows beside the head; other rows, another kind and a cut file are refused."""
    config, target, training = built("vispec", num_queries=2)
    state = training.head.state_dict()
    save_file(state | {"embed_tokens.weight": target.embedding.clone()}, tmp_path / "model.safetensors")
    assert same_weights(config.load(tmp_path, target), state)
    with pytest.raises(UserError, match=r"img_fc|imadpt"):
        config_of(kind="msd", kv_heads="mha", input_norm=False).load(tmp_path, target)
    save_file(state | {"embed_tokens.weight": target.embedding + 1}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="embeddings that are not the target's"):
        config.load(tmp_path, target)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        config.load(tmp_path, target)


def test_a_reduced_vocabulary_that_the_file_has_not(tmp_path):
    config, target, training = built("eagle3-read")
    state = {name: value for name, value in training.head.state_dict().items() if name not in ("d2t", "t2d")}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"d2t is missing.*lm_head.weight is \[20, 32\], expected \[44, 32\]"):
        config.load(tmp_path, target)


def test_a_published_head_turns_as_its_config_says(tmp_path):
    """Weights do not tell: a head that was trained plainly would be turned as its target, and draft badly."""
    target = tables(qwen=False, hidden=64, heads=2)
    target.config = stretched_text("llama3")
    config = config_of(kind="eagle")
    save_file(config.build(target).state_dict(), tmp_path / "model.safetensors")
    for said, taken, refused in (
        ({"rope_scaling": None}, "plain", "target"),
        ({"rope_scaling": {"rope_type": "llama3", **STRETCHED["llama3"]}}, "target", "plain"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(said | {"max_position_embeddings": 512}))
        config.model_copy(update={"rope": taken}).load(tmp_path, target)
        with pytest.raises(UserError, match=r"its rotation \(drafter.rope\) is[\s\S]*at export"):
            config.model_copy(update={"rope": refused}).load(tmp_path, target)


def test_the_second_stage_starts_where_the_first_ended(tmp_path):
    """On text, a head of stage 1 in stage 2's settings does what it did, to the last bit."""
    config, target, training = built("sparrow")
    first = config.training_objective(training.head, target, TEXT_STAGE).eval()
    save_head(training.head, tmp_path, manifest_of(config, target.shape, TargetIdentity({})))
    head = config.load(tmp_path, target)
    second = config.training_objective(head, target).eval()
    batch, states = case_for(config, target, ("tttaaa", "ttaaaa"))
    assert (first.num_passes, second.num_passes) == (1, 2)
    before, after = outputs(first, batch, states), outputs(second, batch, states)
    assert all(torch.equal(before[k][0], after[k][0]) for k in before)
