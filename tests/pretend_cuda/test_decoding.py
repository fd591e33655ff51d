"""Decoding as rank 1 of a node with two pretend devices: the CPU's tokens, captured chains, waits of the host."""

import pytest

from .asking import results_of


@pytest.fixture(scope="module")
def results():
    return results_of("decoding", "two_devices", "wanted", "one_pool")


def test_the_device_says_what_the_cpu_says(results):
    assert set(results["decoding"]["equal"].values()) == {True}, results["decoding"]["equal"]


def test_a_target_on_two_devices_says_what_the_cpu_says(results):
    assert set(results["two_devices"].values()) == {True}, results["two_devices"]


def test_a_rank_s_gpu_is_the_current_one_once_it_has_joined(results):
    """Work of libraries that names no device goes there."""
    assert results["decoding"]["current"] == 1


def test_graphs_are_captured_on_the_ranks_own_device_and_hold_the_passes(results):
    """Of a chain whole, of a head's each; the target's are the longest."""
    captured = {case: graphs for case, graphs in results["decoding"]["graphs"].items() if graphs}
    assert len(captured) == 8 and all("graph" in case for case in captured)
    for case, graphs in captured.items():
        assert {device for device, _ in graphs} == {1}
        assert max(operations for _, operations in graphs) > 100 or "image" in case
        assert min(operations for _, operations in graphs) > 30


def test_the_next_replay_writes_over_nothing_that_is_still_read(results):
    assert results["one_pool"] == [[2.0] * 3] * 2


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
    "plain": ((1, 1), (1, 2), (119, 128)),
    "chain": ((1, 1), (5, 6), (593, 607)),
    "draft tree": ((5, 5), (7, 6.5), (656.33, 660.33)),
    "graph": ((1, 1), (2, 3), (149, 159)),
    "eagle3": ((5, 5), (5, 6.29), (668, 687.71)),
    "eagle": ((5, 5), (5, 6), (585, 599)),
    "sparrow": ((5, 5), (5, 6), (610.43, 623)),
    "dflash": ((1, 1), (2, 3), (505, 516)),
    "image eagle": ((5, 5), (5.5, 6), (361.5, 367)),
    "eagle3 in graphs": ((5, 5), (6, 7.33), (95, 110)),
    "sparrow in graphs": ((5, 5), (6, 7), (91, 101)),
    "image eagle in graphs": ((5, 5), (7, 7), (191, 195)),
}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("case", MOST)
def test_what_a_cycle_asks_of_the_device_is_bounded(results, case, temperature):
    counts = results["decoding"]["cycles"][f"{case} T={temperature}"]
    for what, most in zip(("reads", "uploads", "launches"), MOST[case], strict=True):
        assert counts[what] <= most[temperature], (what, counts)
    assert counts["blocking"] == 0  # nobody waits for a copy


def test_an_evaluation_replays_by_itself_what_it_can_capture(results):
    """By default as where graphs are a must; false is eager."""
    auto, must, eager = (results["wanted"][name] for name in ("auto", "true", "false"))
    for one in (auto, must):
        first, second = one["requests"]
        assert first["equal"] and second["equal"] and first["tried"] == second["tried"] > 2
        for what, most in zip(("reads", "uploads", "launches"), MOST["eagle3 in graphs"], strict=True):
            assert second["counts"][what] <= most[0], (what, second["counts"])
        assert one["notes"] == [] and "captured in" in one["about"]["graphs of the target"]
        assert "EAGLE-3: " in one["about"]["graphs of heads"] and one["held"] == [True, True]
    assert [request["tried"] for request in eager["requests"]] == [0, 0] and eager["requests"][1]["equal"]
    assert eager["notes"] == [] and eager["about"] == {}
    assert eager["requests"][1]["counts"]["launches"] > 5 * auto["requests"][1]["counts"]["launches"]


@pytest.mark.parametrize(("left", "broken"), [(0, "both"), (1, "both"), (2, "target"), (4, "target")])
def test_a_capture_that_breaks_off_leaves_eager_passes_and_one_line(results, left, broken):
    """Of the head's two captures, which come first, or of the target's three. The request goes on with the tokens of
    eager passes, nothing is tried again, and what torch leaves open is closed.
    """
    wanted = results["wanted"]
    found, whole = wanted[f"broken {left}"], wanted["false" if broken == "both" else "auto"]["requests"][1]["counts"]
    first, second = found["requests"]
    assert first["equal"] and second["equal"]
    assert first["tried"] == second["tried"] == left + (2 if broken == "both" else 1)
    assert first["left"] == second["left"] == ["default", 0, "free"]
    launches, eager = second["counts"]["launches"], wanted["false"]["requests"][1]["counts"]["launches"]
    assert launches == eager if broken == "both" else whole["launches"] < launches < eager
    why = "RuntimeError: CUDA error: operation not permitted when stream is capturing"
    whose = {"the target": ("target", "of the target"), "EAGLE-3's head": ("head", "of heads")}
    for name, (key, line) in whose.items():
        off = broken == "both" or key == "target"
        notes = [note for note in found["notes"] if f"passes of {name} run eagerly" in note]
        assert len(notes) == off and all(why in note and f"graphs.{key}=false" in note for note in notes)
        assert (f"off since a capture failed ({why})" in found["about"][f"graphs {line}"]) is off
    assert len(found["notes"]) == (2 if broken == "both" else 1)
    assert found["held"] == [False, broken != "both"]


def test_a_capture_that_is_a_must_and_breaks_off_ends_the_run(results):
    broken = results["wanted"]["true, broken"]
    assert "could not be captured: RuntimeError: CUDA error: operation not permitted" in broken["error"]
    assert "key stages.evaluate.graphs.head" in broken["error"] and "write auto" in broken["error"]
    assert broken["left"] == ["default", 0, "free"]
