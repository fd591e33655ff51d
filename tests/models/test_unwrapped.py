"""Passes without the modules' wrapping: every bit as their own forward, and left to it where it does more."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from draftsmith.models.decoding import decoder, unwrapped
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.decoding.head_layer import DecoderLayer, Rotary
from draftsmith.models.decoding.tree import ancestor_mask
from draftsmith.models.drafters.eagle3 import JoinedLayer
from draftsmith.models.layer import LayerShape
from draftsmith.models.lora import LoraConfig, add_adapters
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

PAST, VOCABULARY = 7, 40
TREE = (-1, -1, 0, 0, 1)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 6},
}


def model_of(family: str = "llama", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, **FAMILIES[family] | settings,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():  # gains that are all 1, and biases that are all 0, would show no mistake
        nn.init.normal_(weight, 0.5, 0.3) if weight.dim() == 1 else nn.init.normal_(weight, 0.0, 0.3)
    return model.eval()


@torch.inference_mode()
def passes(model: Any, layers: tuple[int, ...] = (0, 1, 3)) -> list[torch.Tensor]:
    """Features and tapped states of a prompt, a tree after it and one token, and what the cache then holds."""
    whole = CachedDecoder(model, num_token_ids=VOCABULARY)
    ids = torch.arange(3, 3 + PAST + len(TREE) + 1)[None]
    kv, found = whole.new_cache(30), []
    depths = torch.tensor([0, 1, 1, 2, 2, 2])
    for part, places, mask in (
        (ids[:, :PAST], torch.arange(PAST), None),
        (ids[:, PAST:], PAST + depths, ancestor_mask(TREE)),
        (ids[:, -1:], torch.tensor([PAST]), None),
    ):
        states = whole.forward(whole.embed(part), kv, places[None], mask, layers=layers)
        found += [states.feature, *(states.layers[layer] for layer in layers)]
        kv.advance(PAST if part.shape[1] == PAST else 0)
    return found + [part for layer in kv.own_layers for part in (layer.keys, layer.values)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_bit_is_transformers_own(family, heads, dtype, monkeypatch):
    model, runs = model_of(family, num_key_value_heads=heads).to(dtype), []
    run = unwrapped.run
    monkeypatch.setattr(unwrapped, "run", lambda *given: runs.append(given) or run(*given))
    ours = passes(model)
    assert len(runs) == 3
    monkeypatch.setattr(unwrapped, "layers_of", lambda *given: None)
    for mine, theirs in zip(ours, passes(model), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert len(runs) == 3


def test_a_long_piece_of_a_prompt_keeps_its_boolean_mask(monkeypatch):
    """An additive one takes four times the memory; the numbers are the same."""
    model, kinds, attend = model_of(), [], unwrapped.attend
    few = passes(model)
    monkeypatch.setattr(unwrapped, "attend", lambda *given, **more: kinds.append(given[3]) or attend(*given, **more))
    for limit, kind in ((len(TREE), torch.bool), (len(TREE) + 1, torch.float32)):
        kinds.clear()
        for module in (unwrapped, decoder):
            monkeypatch.setattr(module, "FEW", limit)
        assert all(torch.equal(a, b) for a, b in zip(passes(model), few, strict=True))
        assert {mask.dtype for mask in kinds if mask is not None} == {kind}


def _hooked(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def _forward_of_its_own(model: Any) -> None:
    layer = model.model.layers[2]
    own = layer.forward
    layer.forward = lambda *inputs, **named: own(*inputs, **named) + 1.0


def _adapters(model: Any) -> None:
    add_adapters(model, LoraConfig(layers=("v_proj",)))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)


def _other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def _mixed_layer(model: Any) -> None:
    model.model.layers[0].self_attn = nn.Identity()


CHANGES = (_hooked, _forward_of_its_own, _adapters, _other_activation)


def test_a_model_is_looked_at_once_for_each_request(monkeypatch):
    model, looks = model_of(), []
    look = unwrapped._layers
    monkeypatch.setattr(unwrapped, "_layers", lambda model: looks.append(model) or look(model))
    passes(model)  # three, over one cache
    assert len(looks) == 1
    passes(model)
    assert len(looks) == 2


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_a_model_between_requests_is_not_passed_over(change):
    model = model_of()
    before = passes(model)
    assert unwrapped.layers_of(model.model, Cache(3, 1)) is None  # with gradients
    with torch.inference_mode():
        assert unwrapped.layers_of(model.model, Cache(3, 1)) is not None
    change(model)
    model.eval()
    with torch.inference_mode():
        assert unwrapped.layers_of(model.model, Cache(3, 1)) is None
    assert not torch.allclose(passes(model)[0], before[0])


@torch.inference_mode()
@pytest.mark.parametrize("settings", [{"family": "mistral", "sliding_window": 4}, {"attn_implementation": "eager"}])
def test_windows_and_other_attention_are_left_to_transformers(settings):
    assert unwrapped.layers_of(model_of(**settings).model, Cache(3, 1)) is None


@torch.inference_mode()
def test_a_model_in_training_or_of_another_layer_is_left_to_transformers():
    model = model_of()
    assert unwrapped.layers_of(model.train().model, Cache(3, 1)) is None
    _mixed_layer(model.eval())
    assert unwrapped.layers_of(model.model, Cache(3, 1)) is None


def test_new_weights_are_read_in_the_next_request():
    model = model_of()
    before = passes(model)
    model.load_state_dict({name: 2 * weight for name, weight in model.state_dict().items()}, assign=True)
    assert not torch.allclose(passes(model)[0], before[0])


SHAPE = LayerShape(VOCABULARY, 16, 24, 4, 2, 1e-6)
SHAPES = {
    "EAGLE": SHAPE,
    "biases and norms of heads": replace(SHAPE, qkv_bias=True, qk_rms_norm=True, own_head_dim=6, input_norm=True),
    "codes of pictures": replace(SHAPE, rope="grid", grid=4, num_kv_heads=4),
}


@torch.inference_mode()
def head_states(layer: Any, shape: LayerShape, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of a prompt and a tree after it, for one row and with a mask for each of two; and what the cache then holds."""
    layer.to(dtype).eval()
    rotary, depths = Rotary(shape), torch.tensor([0, 1, 1, 2, 2, 2])
    seen, found = torch.cat([torch.ones(6, PAST, dtype=torch.bool), ancestor_mask(TREE)], dim=1), []
    for rows, mask in ((1, seen), (2, torch.stack([seen, seen.roll(1, -1) | seen]))):
        kv = Cache(1, 30)
        for count, places, part in ((PAST, torch.arange(PAST), None), (6, PAST + depths, mask)):
            states = torch.randn(rows, count, 16, generator=torch.Generator().manual_seed(count)).to(dtype)
            more = (states.flip(0, 1),) if isinstance(layer, JoinedLayer) else ()
            found.append(layer(*more, states, rotary(places), part, kv))
            kv.advance(count if part is None else 0)
        found += [kv.own_layers[0].keys, kv.own_layers[0].values]
    return found


def head_layer(shape: LayerShape, kind: type[nn.Module] = DecoderLayer) -> Any:
    torch.manual_seed(0)
    layer = kind(replace(shape, attention_input=32) if kind is JoinedLayer else shape)
    for weight in layer.parameters():
        nn.init.normal_(weight, 0.5, 0.3) if weight.dim() == 1 else nn.init.normal_(weight, 0.0, 0.3)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [DecoderLayer, JoinedLayer])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_of_a_heads_layer_is_its_modules(shape, kind, dtype, monkeypatch):
    layer, runs = head_layer(SHAPES[shape], kind), []
    step = unwrapped.step
    monkeypatch.setattr(unwrapped, "step", lambda *given: runs.append(given) or step(*given))
    ours = head_states(layer, SHAPES[shape], dtype)
    assert len(runs) == 4
    monkeypatch.setattr(unwrapped, "head_layer_of", lambda *modules: None)
    for mine, theirs in zip(ours, head_states(layer, SHAPES[shape], dtype), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert len(runs) == 4


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj", "post_attention_layernorm", "mlp", "self_attn"])
def test_hooks_within_a_heads_layer_are_called(name):
    layer, called = head_layer(SHAPE), []
    layer.get_submodule(name).register_forward_hook(lambda *_: called.append(1))
    head_states(layer, SHAPE, torch.float32)
    assert len(called) == 4


def test_a_heads_layer_with_gradients_or_norms_of_its_own_runs_its_modules():
    own_norms = head_layer(replace(SHAPE, qk_norm=True))
    parts = [(part.self_attn, part.mlp, part.post_attention_layernorm) for part in (head_layer(SHAPE), own_norms)]
    assert unwrapped.head_layer_of(*parts[0], Cache(1, 1)) is None
    with torch.inference_mode():
        assert unwrapped.head_layer_of(*parts[0], Cache(1, 1)) is not None
        assert unwrapped.head_layer_of(*parts[1], Cache(1, 1)) is None
