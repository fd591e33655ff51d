"""Counts of the meta device against what the same passes make of real tensors, at tiny size."""

import family_checks
import heads_tiny
import pytest
import tiny
import tiny_qwen
import torch
import visual_tiny
from draftsmith.models.drafters import DflashConfig, MedusaConfig
from draftsmith.models.fast import causal_blocks
from draftsmith.models.targets.base import ShapeAlone
from draftsmith.models.targets.causal.section import CausalTarget
from draftsmith.trainers.estimate.counted import META, along, most_bytes
from draftsmith.trainers.estimate.train_memory import _backward, _batch, _codes, _states
from live_tensors import Live
from tiny_saved import built

SIZES = {"qwen": False, "hidden": 96, "heads": 6, "kv_heads": 2, "intermediate": 256, "vocab": 200}


def test_a_tensor_counts_while_it_lives_and_a_view_never():
    weight = torch.empty(100, device=META)

    def run():
        first = weight + 1
        again = first.view(10, 10)
        del first
        held = again.sum(0), weight[:50], weight.mul_(2)
        del again
        return held, weight.double()

    assert most_bytes(run) == max(400 + 40, 40 + 800)


def test_steps_of_one_size_are_counted_twice():
    counted = []
    assert along(lambda size: counted.append(size) or 5.0 + 3 * size, 100, 4) == 305 and counted == [4, 8]
    assert along(lambda size: size**2, 8, 4) == 64


@pytest.mark.parametrize("settings", [
    *(pytest.param(heads_tiny.SETTINGS[name], id=name) for name in ("eagle", "eagle3", "sparrow", "sparrow-ttt")),
    *(pytest.param(heads_tiny.SETTINGS[name], id=name) for name in ("msd", "vispec", "hivis")),
    pytest.param({"kind": "dflash", "block_size": 6, "num_layers": 2}, id="dflash"),
    pytest.param({"kind": "medusa"}, id="medusa"),
    pytest.param({"kind": "peagle"}, id="peagle"),
])  # fmt: skip
def test_a_heads_step_is_what_real_tensors_take(settings):
    # Beside a mask a GPU folds grouped heads, and a CPU reads them as they are: no groups where there are masks.
    groups = {"kv_heads": 6} if settings["kind"] in ("dflash", "peagle") else {}
    config, target = heads_tiny.config_of(**settings), heads_tiny.tables(**SIZES | groups)
    batch = _batch(3, 128, 16)
    taps = config.taps_for(target.shape, training=True)

    def step(training, host, device):
        states = _states(taps, 96, "float32", host.ids, 128)
        made = {layer: torch.zeros(3, 128, 96, device=device) for layer in states.layers}
        feature = None if states.feature is None else torch.zeros(3, 128, 96, device=device)
        _backward(training, training(host, type(states)(feature, made, host.positions)))

    head = config.build(target, count_tokens=lambda: torch.arange(200))
    training = config.training_objective(head, target).eval()
    with Live() as live:
        step(training, batch._source, "cpu")
    empty = config.training_objective(config.empty(target.shape), ShapeAlone(target.shape)).eval()
    counted = most_bytes(lambda: step(empty, batch, META))
    assert 0.9 < counted / live.most < 1.1, (counted, live.most)


@pytest.mark.parametrize("config", [visual_tiny.EAGLE, MedusaConfig(kind="medusa", num_heads=3),
                                    DflashConfig(kind="dflash", block_size=4, num_layers=1, taps=(1,))])  # fmt: skip
def test_a_step_of_an_image_generators_head_is_what_real_tensors_take(config, monkeypatch):
    # A GPU's step is counted, where more blocks attend at once than on the CPU that runs it here.
    monkeypatch.setattr(causal_blocks, "BLOCKS_ON_CPU", causal_blocks.BLOCKS)
    model = visual_tiny.llamagen("text", 0, grid=8, vocab=256, dim=32)
    target = visual_tiny.target(model)
    batch = visual_tiny.code_batch(model, torch.randint(0, 24, (3, 64)))
    taps = config.taps_for(target.shape, training=True)
    states = target.states(batch, taps)
    training = config.training_objective(config.build(target), target).eval()
    with Live() as live:
        _backward(training, training(batch, states))
    empty = config.training_objective(config.empty(target.shape), ShapeAlone(target.shape)).eval()
    places = states.ids.shape[1] - 64
    own, theirs = _codes(3, places, 64, target.shape, taps, "float32")
    counted = most_bytes(lambda: _backward(empty, empty(own, theirs)))
    assert 0.9 < counted / live.most < 1.1, (counted, live.most)


@pytest.mark.parametrize("kind", ["causal_lm", "llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_targets_pass_over_a_batch_is_what_real_tensors_take(kind):
    """Its cache among them, which a plain forward would not have."""
    model = built(kind)
    text = lambda model: CausalTarget(model, num_token_ids=98)  # noqa: E731
    target = {"llava": tiny.target, "causal_lm": text}.get(kind, tiny_qwen.target)
    family_checks.check_memory(model, target, 128)
