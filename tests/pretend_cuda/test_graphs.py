"""A target's passes as graphs on the pretend device: eager passes' tokens, and fewer launches."""

import pytest

from .test_decoding import results_of

CASES = (
    "llama chain T=0", "llama tree T=1", "llava plain T=0", "llava chain T=1", "llava tree T=0", "qwen2_5_vl chain T=0",
    "qwen2_5_vl tree T=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def results():
    found = results_of("graphs.verification")["graphs.verification"]
    assert found.keys() == {*CASES, "outlives"}
    return found


@pytest.mark.parametrize("case", CASES)
def test_graphs_say_what_eager_passes_say(results, case):
    """Two requests in the same buffers, over several lengths."""
    result = results[case]
    assert result["equal"] and result["num_replayed"] >= 8 and result["num_eager"] == 0


def test_what_a_pass_returns_outlives_the_next_ones(results):
    assert results["outlives"]


@pytest.mark.parametrize("case", CASES)
def test_a_pass_is_one_launch(results, case):
    """Beside it: the copy of what it reads, those of what it returns, and what the rule asks."""
    result = results[case]
    assert all(device == 1 and operations > 200 for device, operations in result["captured"])
    pairs = [(eager, graphs) for eager, graphs in result["launches"] if graphs is not None]
    assert len(pairs) >= 4 and all(graphs <= eager - 100 for eager, graphs in pairs), result
    if "plain" in case:
        assert all(graphs <= 13 for _, graphs in pairs)


def test_buckets_change_inside_an_answer_and_paths_are_accepted(results):
    assert all(len(results[case]["lengths"]) > 1 for case in CASES), "two requests, and longer as they go on"
    assert sum(results[case]["accepted"] > 0 for case in CASES) >= 3
