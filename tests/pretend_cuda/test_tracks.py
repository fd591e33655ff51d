"""A tiny run of each track on the pretend device, as rank 1 of its node: trained, cached, drawn and measured there."""

import pytest

from .asking import results_of

pytestmark = pytest.mark.slow

STAGES = {
    "draft": ["world", "seeing", "target", "language", "pretrain", "finetune", "evaluate"],
    "states": ["world", "target", "answers", "states", "head", "evaluate"],
    "images": [
        "world", "pictures", "vq", "reader", "codes", "target", "features", "head", "head_without_dropout", "evaluate",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def results():
    found = results_of(*(f"tracks.{name}" for name in STAGES))
    draft = found["tracks.draft"]
    return {
        "draft": draft["one"], "states": found["tracks.states"], "images": found["tracks.images"],
        "spread": draft["spread"], "same cycles": draft["same cycles"],
    }  # fmt: skip


@pytest.mark.parametrize("track", STAGES)
def test_every_stage_runs_on_the_ranks_own_device_alone(results, track):
    result = results[track]
    assert result["finished"] == STAGES[track]
    assert result["trained on"] == result["launched on"] == ["cuda:1"]
    assert result["identical"], "greedy tokens are plain decoding's"
    assert result["requests"] > 0


def test_passes_are_graphs_where_they_can_be(results):
    """By themselves. The tokens of both are compared: those of the target over two devices come from eager passes."""
    draft, spread, states = (results[name] for name in ("draft", "spread", "states"))
    assert "the target: " in draft["said"] and "passes replayed" in draft["said"] and draft["graphs"]
    assert all(device == 1 for device, _ in draft["graphs"])
    assert "the target: off" in spread["said"] and "Sparrow: " in states["said"]
    for track, has_some in ((draft, True), (states, True), (spread, False)):
        assert {target > 0 for target, _ in track["replayed"].values()} == {has_some}
    assert states["replayed"]["Sparrow"][1] > 0
    assert states["replayed"]["SpecVLM"][1] > 0, "its draft is a whole model, whose passes are as a target's"
    assert states["replayed"]["plain decoding"][1] == 0
    assert results["images"]["replayed"].keys() and not any(map(sum, results["images"]["replayed"].values()))


def test_a_trained_target_is_measured_over_two_devices_as_on_one(results):
    spread = results["spread"]
    assert spread["identical"] and results["same cycles"]
    assert spread["launched on"] == ["cuda:0", "cuda:1"]
