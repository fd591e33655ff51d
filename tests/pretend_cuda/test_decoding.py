"""Decoding as rank 1 of a node with two pretend devices: the CPU's tokens, captured chains, waits of the host."""

import pytest

from .asking import results_of

pytestmark = pytest.mark.slow  # minutes of decoding; each part has quick tests of its own


@pytest.fixture(scope="module")
def results():
    return results_of("decoding", "two_devices")


def test_the_device_says_what_the_cpu_says(results):
    assert set(results["decoding"]["equal"].values()) == {True}, results["decoding"]["equal"]


def test_a_target_on_two_devices_says_what_the_cpu_says(results):
    assert set(results["two_devices"].values()) == {True}, results["two_devices"]


def test_a_rank_s_gpu_is_the_current_one_once_it_has_joined(results):
    """Work of libraries that names no device goes there."""
    assert results["decoding"]["current"] == 1


def test_graphs_are_captured_on_the_ranks_own_device_and_hold_the_passes(results):
    captured = {case: graphs for case, graphs in results["decoding"]["graphs"].items() if graphs}
    assert len(captured) == 6 and all("in graphs" in case for case in captured)
    for graphs in captured.values():
        assert {device for device, _ in graphs} == {1}
        assert max(operations for _, operations in graphs) > 100 and min(operations for _, operations in graphs) > 30


def test_clocks_wait_for_the_ranks_own_device(results):
    assert results["decoding"]["waits"] == [1]


# Means of whole cycles, greedy and sampled, as they were counted: of tiny targets of two layers, or six beside DFlash
# and the heads of language models. Lower them with the count.
# reads: what the host must wait for. Deeper trees (these have four levels) read once more a level.
# uploads: one for each pass (a level, the verification, what was accepted) and for a path that a tree's order does not
# begin with; a chain's first pass reads what was accepted, and a graph's root. Sampling sends its uniforms.
# launches: the host's time. A norm counts as its six operations, and is one launch on a GPU. In graphs: beside a launch
# for each pass, the copies of what it reads and returns, and what the tree's policy asks.
MOST = {  # reads, uploads, launches
    "plain": ((1, 1), (1, 2), (127, 136)),
    "chain": ((1, 1), (5, 6), (636, 650)),
    "draft tree": ((5, 5), (7, 6.5), (708.33, 712.33)),
    "eagle3": ((5, 5), (5, 6.29), (707, 726.71)),
    "eagle": ((5, 5), (5, 6), (624, 638)),
    "sparrow": ((5, 5), (5, 6), (649.43, 662)),
    "dflash": ((1, 1), (2, 3), (544, 555)),
    "image eagle": ((5, 5), (5.5, 6), (361.5, 367)),
    "eagle3 in graphs": ((5, 5), (5, 6.33), (186, 205)),
    "sparrow in graphs": ((5, 5), (5, 6), (144, 158)),
    "chain in graphs": ((1, 1), (5, 6), (300, 310)),
}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("case", MOST)
def test_what_a_cycle_asks_of_the_device_is_bounded(results, case, temperature):
    counts = results["decoding"]["cycles"][f"{case} T={temperature}"]
    for what, most in zip(("reads", "uploads", "launches"), MOST[case], strict=True):
        assert counts[what] <= most[temperature], (what, counts)
    assert counts["blocking"] == 0  # nobody waits for a copy
