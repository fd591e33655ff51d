"""Estimates of a dry run against torch's own counts, at tiny size: weights and cache exact, the rest within two."""

import pytest
import tiny
import tiny_qwen
import torch
from draftsmith.core.states import Taps
from draftsmith.models.decoding.tree import chain
from draftsmith.models.memory import Decoding, _recurrent_bytes, activation_bytes, cache_bytes, peak, weight_bytes
from live_tensors import Live
from tiny_saved import SIZES, built

KINDS = (
    "causal_lm",
    "llava",
    "llava_onevision",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_torch_counts(kind):
    model = built(kind)
    actual = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
    assert sum(weight_bytes(model.config, "float32").values()) == actual
    model = model.to(torch.bfloat16)
    actual = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
    assert sum(weight_bytes(model.config, "bfloat16").values()) == actual


def opened(kind: str, reads: str):
    """The estimates are of the longest text after the pictures, and of nothing but pictures: each is asked so."""
    if kind == "llava":
        return tiny.target(built(kind)), tiny.request(0, images=3, words=150, sizes=SIZES)
    images, words = (((4, 6),), 180) if reads == "attention" else (((8, 12),) * 8, 10)
    return tiny_qwen.target(built(kind)), tiny_qwen.request(kind, images=images, words=words)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("reads", ["attention", "nothing"])
def test_cache_is_exact_and_a_prompt_within_a_factor_of_two(kind, reads):
    target, request = opened(kind, reads)
    attends = 3 if kind == "qwen3_5" else 0
    config, tapped = target.decoder.model.config, (attends,) if reads == "attention" else ()
    positions = len(request.ids) + 10
    with Live() as live:
        session, _ = target.prefill(request, Taps(prefill_attention=tapped), capacity=10)
    layers = session.cache.own_layers
    held = sum(part.numel() * part.element_size() for layer in layers for part in (layer.keys, layer.values))
    recurrent = getattr(session.cache, "recurrent", ())
    held += sum(part.numel() * part.element_size() for layer in recurrent for part in (layer.state, layer.inputs))
    assert held == cache_bytes(config, "float32", positions)
    estimate = peak(activation_bytes(config, "float32", Decoding(positions, attention=bool(tapped))))
    assert 0.5 < estimate / (live.most - held) < 2, (estimate, live.most - held)


def test_what_a_tree_writes_in_recurrent_layers_is_exact():
    """It stays until the accepted path is known."""
    target, request = opened("qwen3_5", "nothing")
    session, _ = target.prefill(request, Taps(), capacity=40)
    layers = session.cache.recurrent
    before = sum(layer.inputs.nbytes for layer in layers)
    target.verify(session, 9, chain(torch.arange(5, 35)))
    held = sum(layer.inputs.nbytes for layer in layers) - before
    held += sum(part.nbytes for layer in layers for part in vars(layer.written).values())
    assert held == _recurrent_bytes(target.decoder.model.config.get_text_config(), 4, places=0, nodes=31)


def test_a_long_prompt_that_is_read_in_pieces_is_covered():
    """Its embeddings and last states stay whole."""
    target, request = tiny.target(built("llava")), tiny.request(0, images=0, words=1200, sizes=SIZES)
    target.prefill_chunk, positions = 8, len(request.ids) + 10
    with Live() as live:
        session, _ = target.prefill(request, Taps(), capacity=10)
    held = sum(part.nbytes for layer in session.cache.own_layers for part in (layer.keys, layer.values))
    estimate = peak(activation_bytes(target.decoder.model.config, "float32", Decoding(positions, chunk=8)))
    assert 1 < estimate / (live.most - held) < 2, (estimate, live.most - held)
