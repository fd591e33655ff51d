"""Quantised folders whose scales nothing reads would be another model: refused by name, whoever loads them."""

import json

import pytest
import torch
from draftsmith.models.targets.load import load_weights
from fails import fails_with
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def declare(folder, method):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method}))


def store(folder, change):
    """Write the projections as `change` (name, weight) -> tensors has them."""
    stored = {}
    for name, value in load_file(folder / "model.safetensors").items():
        stored |= change(name, value) if name.endswith("_proj.weight") else {name: value}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def scaled(suffix):
    """FP8 weights with one scale each, stored under the weight's name with `suffix` behind it or in its place."""

    def change(name, value):
        scale = value.abs().max() / 448
        beside = name + suffix if suffix.startswith("_") else name.removesuffix("weight") + suffix
        return {name: (value / scale).to(torch.float8_e4m3fn), beside: scale}

    return change


def load(folder):
    return load_weights(AutoModelForCausalLM, folder, revision=None, dtype=torch.float32, key="target.path")


# ModelOpt, DeepSeek's blocks without their config, compressed-tensors' and vLLM's activations, GPTQ's groups, NVFP4.
SUFFIXES = ("_scale", "_scale_inv", "input_scale", "scales", "_scale_2", "weight_zero_point", "k_scale", "absmax")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_scales_that_nothing_reads_are_refused(folder, suffix):
    store(folder, scaled(suffix))
    refusal = fails_with(r"quantised.*proj\.\w*(scale|zero|absmax)", load, folder)
    assert str(folder) in str(refusal) and "unquantised" in str(refusal)


def test_a_method_that_transformers_does_not_apply_is_named(folder):
    declare(folder, {"quant_method": "modelopt", "quant_algo": "FP8"})
    fails_with("modelopt", load, folder)


def test_packed_weights_are_told_as_quantised_and_not_as_missing(folder):
    store(folder, lambda name, value: {name.removesuffix("weight") + "qweight": value.to(torch.int32)})
    fails_with(r"quantised.*qweight", load, folder)


def test_the_package_that_a_method_wants_is_named(folder):
    declare(folder, {"quant_method": "gptq", "bits": 4})
    refusal = fails_with("optimum", load, folder)
    assert "install" in str(refusal) and "check the name and the network" not in str(refusal)


def test_scales_of_the_model_itself_are_none_of_a_quantiser(folder):
    state = load_file(folder / "model.safetensors")
    save_file(state | {"logit_scale": torch.ones(())}, folder / "model.safetensors", metadata={"format": "pt"})
    load(folder)
