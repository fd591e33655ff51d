"""Estimates of a dry run against torch's own counts, at tiny size: weights and cache exact, the rest within two."""

import copy
from types import SimpleNamespace

import pytest
import tiny
import tiny_qwen
import torch
from draftsmith.core.states import Taps
from draftsmith.models.families.memory import cache_bytes, weight_bytes
from draftsmith.trainers.estimate.passes import Pass, moment
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
    family = tiny if kind == "llava" else tiny_qwen
    section = SimpleNamespace(kind=kind, target=lambda model, **_: family.target(model))
    fresh = copy.deepcopy(config)  # as a dry run has it: the target has set its own attention
    for one in (fresh, fresh.get_text_config(), fresh.vision_config):
        one._attn_implementation = "sdpa"
    counted = moment(fresh, section, "float32", Pass(positions, attention=bool(tapped)))
    # Windows at the edges of a picture are shorter, and its patches are sorted by them: these pictures have no edges.
    assert 0.5 < counted / (live.most - held) < (2.5 if kind == "qwen2_5_vl" else 2), (counted, live.most - held)
