"""NaN and infinity in weights, scores and states are found, and nothing else is."""

import math

import pytest
import torch
from draftsmith.core.finite import NotFinite, check_module, check_states, check_weights, likeliest
from draftsmith.core.states import TargetStates
from fails import fails_with
from torch import nn

BAD = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_weight_is_refused_by_its_name_and_file(tmp_path, dtype, value):
    weights = {"a.weight": torch.randn(40, 30).to(dtype), "b.bias": torch.zeros(5, dtype=dtype), "n": torch.tensor([1])}
    weights["most"] = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)  # large, and finite
    (tmp_path / "model.safetensors").touch()
    check_weights(weights, tmp_path)
    weights["a.weight"][31, 7] = value
    caught = fails_with(r"weight a\.weight holds NaN or infinity", check_weights, weights, tmp_path)
    assert caught.where == str(tmp_path / "model.safetensors") and "fetch them again" in str(caught)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_one_byte_are_read_too(tmp_path, dtype):
    """torch finds no extremes of theirs."""
    weight = torch.randn(40, 30).to(dtype)
    check_weights({"w": weight}, tmp_path)
    weight.view(torch.uint8)[31, 7] = 0x7F  # NaN in both
    fails_with("weight w holds NaN", check_weights, {"w": weight}, tmp_path)


def test_the_file_of_a_shard_is_named(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "model-2.safetensors"}}')
    model = nn.Linear(2, 2)
    model.weight.data[0, 0] = math.nan
    assert fails_with("", check_module, model, tmp_path).where == str(tmp_path / "model-2.safetensors")


@pytest.mark.parametrize("index", [b'{"weight_map": {"wei', b"", b"\xff", b"[]", b'{"weight_map": [1]}'])
def test_a_cut_index_hides_no_bad_weight(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    caught = fails_with("weight a holds NaN", check_weights, {"a": torch.tensor([math.nan])}, tmp_path)
    assert caught.where == str(tmp_path)


def test_masks_that_are_not_stored_and_weights_on_no_device_are_passed_over():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), -math.inf), persistent=False)
    model.other = nn.Linear(2, 2, device="meta")
    check_module(model, "me/model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_is_argmax_of_good_rows(dtype):
    scores = torch.randn(50, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[3, 5:9] = 9.0  # ties
    scores[4, 7:] = -math.inf  # masked
    assert torch.equal(likeliest(scores), scores.argmax(-1)) and torch.equal(likeliest(scores[0]), scores[0].argmax())
    scores[1, 4], scores[2, 8], scores[6] = math.nan, math.inf, -math.inf
    assert (likeliest(scores) < 0).nonzero()[:, 0].tolist() == [1, 2, 6]


def test_states_are_refused_by_the_samples_name():
    feature, layer = torch.zeros(3, 4, 5), torch.zeros(3, 4, 5)
    states = TargetStates(feature, {2: layer})
    check_states(states, ("a", "b", "c"))
    layer[1, 3, 2] = math.inf
    caught = fails_with("hidden states are not finite", check_states, states, ("a", "b", "c"), error=NotFinite)
    assert caught.where == "request b"
    layer[1], feature[2, 0, 0] = 0.0, math.nan
    check_states(states, ("a", "b"))  # a filler
