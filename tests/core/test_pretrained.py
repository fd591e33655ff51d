"""Sizes in a model's config before anything is made of them, and folders that hold no model."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.json_types import value_at
from draftsmith.core.pretrained import Checkpoint, check_config, check_pretrained
from draftsmith.models.formats.target import export_target
from draftsmith.models.hub import load_pretrained
from fails import fails_with, raising
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.mark.parametrize("place", [("hidden_size",), ("text_config", "num_hidden_layers"), ("parts", "1", "head_dim")])
def test_sizes_that_no_model_has_are_refused_at_any_depth(tmp_path, place):
    config = {"hidden_size": 64, "text_config": {"num_hidden_layers": 2}, "parts": [{}, {"head_dim": 16}]}
    check_config(config, tmp_path)
    value_at(config, *place[:-1])[place[-1]] = 10**9
    fails_with(rf"{'.'.join(place)} is 1,000,000,000, and models have up to", check_config, config, tmp_path)


def test_an_adapter_is_named_with_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "me/base"}')
    assert "merge it into me/base" in fails_with("holds a PEFT adapter", check_pretrained, tmp_path).hint
    (tmp_path / "config.json").write_text("{}")
    assert "if it is merged" in fails_with("beside a model: transformers would add it", check_pretrained, tmp_path).hint


@pytest.mark.parametrize(("key", "value"), [
    ("rms_norm_eps", float("nan")), ("layer_norm_eps", -1e-5), ("rms_norm_eps", float("inf")), ("rope_theta", 0),
    ("rope_theta", float("nan")),
])  # fmt: skip
def test_epsilons_and_bases_that_make_noise_are_refused(tmp_path, key, value):
    config = {"text_config": {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e4}}}
    check_config(config, tmp_path)
    inner = config["text_config"]["rope_parameters"] if key == "rope_theta" else config["text_config"]
    fails_with(
        rf"{key} is .*, expected a number of at least", check_config, config | {"inner": inner | {key: value}}, tmp_path
    )


def llama(folder, **more):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                                 num_attention_heads=2, **more)).save_pretrained(folder)  # fmt: skip
    return folder


def test_a_folder_with_a_file_and_older_shards_is_refused(tmp_path, monkeypatch):
    """transformers reads the file, vLLM the shards: two models."""
    folder = llama(tmp_path / "one")
    names = [*load_file(folder / "model.safetensors")]
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Checkpoint(folder).weights() == [folder / "model.safetensors"], "an index without its files"
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    for read in (
        Checkpoint(folder).weights,
        lambda: check_pretrained(folder),
        lambda: export_target(folder, tmp_path / "x"),
    ):
        fails_with("there are model.safetensors and shards of model.safetensors.index.json", read)
    fails_with("cannot read model.safetensors of 'no/such/folder'", Checkpoint("no/such/folder").weights)
    monkeypatch.setattr("transformers.utils.cached_file", lambda _, name, **__: str(folder / name))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda _, name, **__: str(folder / name))
    siblings = [SimpleNamespace(rfilename=path.name) for path in folder.iterdir()]
    asks, page = [], raising(json.JSONDecodeError("a proxy's page", "<", 0))
    for ask in (lambda *_, **__: asks.append(1) or SimpleNamespace(siblings=siblings), raising(OSError("no")), page):
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", ask)
        source = f"me/both-{id(ask)}"
        for read in (Checkpoint(source).weights, lambda source=source: load_pretrained(pytest.fail, source)):
            error = fails_with("there are model.safetensors and shards of model.safetensors.index.json", read)
            assert "name a revision" in error.hint
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", pytest.fail)
    monkeypatch.setenv("RANK", "1")
    fails_with("there are model.safetensors and shards", Checkpoint("me/other").weights)
    assert asks == [1], "once, by rank 0"
    (folder / "model.safetensors").unlink()
    assert Checkpoint(folder).weights() == [folder / "model-00001-of-00001.safetensors"]


@pytest.mark.parametrize("change", ["norms", "bias", "depth", "head"])
def test_weights_that_the_config_leaves_out_are_refused(tmp_path, change):
    folder = llama(tmp_path, attention_bias=change == "bias")
    load_pretrained(LlamaForCausalLM.from_pretrained, folder)
    config = json.loads((folder / "config.json").read_text()) | {"attention_bias": False}
    state = load_file(folder / "model.safetensors")
    if change == "depth":
        config["num_hidden_layers"] = 1
    if change == "norms":
        state["model.layers.1.self_attn.q_norm.weight"] = torch.ones(8)
    if change == "head":
        state["lm_head.bias"] = torch.ones(32)
    save_file(state | {"mtp.layers.0.norm.weight": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    named = {"norms": "s.1.self_attn.q_norm", "bias": "s.0.self_attn.k_proj", "depth": "s.1.input_layernorm",
             "head": "lm_head.bias"}  # fmt: skip
    problem = rf"do not fit config.json: \S*{named[change]}\S* is not part of this model"
    fails_with(problem, load_pretrained, LlamaForCausalLM.from_pretrained, folder)
