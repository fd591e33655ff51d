"""A tiny run of each track on the pretend device, as rank 1 of its node: trained, cached, drawn and measured there."""

import pytest

from .asking import results_of

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


def test_chains_of_a_draft_are_captured_there(results):
    graphs = results["draft"]["graphs"]
    assert graphs and all(device == 1 and operations > 100 for device, operations in graphs)


def test_the_targets_passes_are_graphs_where_they_can_be(results):
    """By themselves. The tokens of both are compared: those of the target over two devices come from eager passes."""
    said = results["draft"]["of the target"]
    assert "captured in" in said and "passes replayed" in said and "eager" not in said
    assert "off: the target lies on 2 devices" in results["spread"]["of the target"]
    for name, has_some in (("draft", True), ("states", True), ("spread", False)):
        assert {target > 0 for target, _ in results[name]["replayed"].values()} == {has_some}, name
    assert results["images"]["replayed"].keys() and not any(map(sum, results["images"]["replayed"].values()))


def test_the_passes_of_heads_are_graphs(results):
    said = results["states"]["of heads"]
    assert "Sparrow: " in said and "captured in" in said and "0 passes" not in said and "eager" not in said
    assert "no head with levels: SpecVLM" in said
    replayed = results["states"]["replayed"]
    assert replayed["Sparrow"][1] > 0 and replayed["SpecVLM"][1] == replayed["plain decoding"][1] == 0


def test_a_trained_target_is_measured_over_two_devices_as_on_one(results):
    spread = results["spread"]
    assert spread["identical"] and results["same cycles"]
    assert spread["launched on"] == ["cuda:0", "cuda:1"]
    assert spread["graphs"] and all(operations > 100 for _, operations in spread["graphs"])
