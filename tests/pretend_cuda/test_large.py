"""Targets that are read from files onto two pretend devices: straight there, spread, or refused because they spill."""

import pytest

from .asking import results_of


@pytest.fixture(scope="module")
def results():
    return results_of("large.straight", "large.spread", "large.spilling", "large.stored")


def test_weights_are_read_straight_onto_the_device(results):
    straight = results["large.straight"]
    control = straight.pop("by way of the host")
    assert control["equal"] and control["moved from the host"] > 20, "else this test could not fail"
    assert len(straight) == 9
    for name, result in straight.items():
        assert result.pop("places") == ["cuda:1"], name
        assert result == {"equal": True, "same types": True, "moved from the host": 0}, name


def test_auto_holds_what_is_stored_on_the_device_and_float32_on_the_cpu(results):
    names = ("llava", "qwen2_5_vl", "qwen3_vl", "causal_lm", "llamagen")
    types = {name: ["bfloat16", "float32", "float16"] for name in names}
    assert results["large.stored"] == {name: [[one] for one in found] for name, found in types.items()}


def test_a_target_over_two_devices_says_what_the_cpu_says(results):
    assert set(results["large.spread"]["equal"].values()) == {True}, results["large.spread"]
    assert all(places == ["cuda:0", "cuda:1"] for places in results["large.spread"]["places"].values())


def test_a_target_that_the_gpus_do_not_hold_is_refused_unless_the_host_was_asked_for(results):
    spilling = results["large.spilling"]
    assert "target.device_map is auto, and 2 GPU(s) do not hold 4 of 10 parts" in spilling["refused"]
    assert "target.offload=cpu" in spilling["refused"]
    assert spilling["places"] == ["cuda:0", "cuda:1", "meta"]
    assert set(spilling["equal"].values()) == {True}
