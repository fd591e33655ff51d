"""Estimates of a dry run against torch's own counts, at tiny size: weights and cache exact, the rest closely."""

import copy
from types import SimpleNamespace

import pytest
import tiny
import tiny_qwen
import torch
from draftsmith.core.batch import IMAGE
from draftsmith.core.states import Taps
from draftsmith.models.families.memory import cache_bytes, weight_bytes
from draftsmith.trainers.estimate.passes import Pass, moment, tower_moment
from live_tensors import Live
from tiny_saved import SIZES, built

KINDS = ("causal_lm", "llava", "llava_onevision", *tiny_qwen.KINDS)
CAPACITY = 8  # of tokens behind a prompt


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_torch_counts(kind):
    model = built(kind)
    actual = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
    assert sum(weight_bytes(model.config, "float32").values()) == actual
    model = model.to(torch.bfloat16)
    actual = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
    assert sum(weight_bytes(model.config, "bfloat16").values()) == actual


def opened(kind: str, reads: str):
    """The estimates are of the longest text after the pictures, and of nothing but pictures: each is asked so. A count
    over 254 positions has one picture of 15 x 16 places, as this request has.
    """
    if kind == "llava":
        return tiny.target(built(kind)), tiny.request(0, images=3, words=150, sizes=SIZES)
    images, words = (((4, 6),), 180) if reads == "attention" else (((30, 32),), 1)
    return tiny_qwen.target(built(kind)), tiny_qwen.request(kind, images=images, words=words)


def as_a_dry_run_has_it(target, kind: str):
    """The config, whose attention the target has set, and a section that opens such targets."""
    fresh = copy.deepcopy(target.decoder.model.config)
    for one in (fresh, fresh.get_text_config(), fresh.vision_config):
        one._attn_implementation = "sdpa"
    family = tiny if kind == "llava" else tiny_qwen
    return fresh, SimpleNamespace(kind=kind, target=lambda model, **_: family.target(model))


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("reads", ["attention", "nothing"])
def test_cache_is_exact_and_a_prompt_is_counted_closely(kind, reads):
    target, request = opened(kind, reads)
    attends = 3 if kind == "qwen3_5" else 0
    config, tapped = target.decoder.model.config, (attends,) if reads == "attention" else ()
    positions = len(request.ids) + CAPACITY
    with Live() as live:
        session, _ = target.prefill(request, Taps(prefill_attention=tapped), capacity=CAPACITY)
    layers = session.cache.own_layers
    held = sum(part.numel() * part.element_size() for layer in layers for part in (layer.keys, layer.values))
    recurrent = getattr(session.cache, "recurrent", ())
    held += sum(part.numel() * part.element_size() for layer in recurrent for part in (layer.state, layer.inputs))
    assert held == cache_bytes(config, "float32", positions)
    counted = moment(*as_a_dry_run_has_it(target, kind), "float32", Pass(positions, attention=bool(tapped)))
    # A count is of CAPACITY places more, and attention that is read grows by their square.
    most = 1.4 if reads == "attention" else 1.1
    assert 0.9 < counted / (live.most - held) < most, (counted, live.most - held)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_tower_is_counted_to_a_percent_over_the_picture_that_it_is_counted_with(kind):
    """A count is of one picture; as many places of smaller ones take less where its windows are cut at an edge."""
    target = tiny_qwen.target(built(kind))

    def taken(*images: tuple[int, int]) -> int:
        shown = tiny_qwen.request(kind, images=images)
        pictured = shown.modality == IMAGE
        ids, modality = shown.ids[pictured][None], shown.modality[pictured][None]
        with torch.no_grad(), Live() as live:
            target.decoder.prompts(ids, modality, shown.pixels, list(shown.pictures))
        return live.most

    counted = tower_moment(*as_a_dry_run_has_it(target, kind), "float32", 15 * 16)
    assert taken((30, 32)) == pytest.approx(counted, rel=0.01)
    assert taken(*((8, 12),) * 10) < 1.1 * counted
