"""A head's passes as graphs on the pretend device: eager passes' tokens, and fewer launches."""

import pytest

from .asking import results_of

CASES = (
    "eagle3 dynamic T=1", "eagle3 chain T=0", "eagle dynamic T=0", "sparrow static T=1", "vispec dynamic T=1",
    "image eagle dynamic T=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def results():
    found = results_of("head_graphs.levels")["head_graphs.levels"]
    assert found.keys() == {*CASES, "spread"}
    return found


@pytest.mark.parametrize("case", CASES)
def test_graphs_say_what_eager_passes_say(results, case):
    """Two requests in the same buffers, over several lengths; replaying one graph spoils what others returned."""
    result = results[case]
    assert result["equal"] and result["num_replayed"] >= 20 and result["num_eager"] == 0
    assert {name for name, _ in result["passes"]} == {"root", "level"}
    assert all(device == 1 and operations > 30 for device, operations in result["captured"])


def test_requests_come_to_several_lengths(results):
    assert sum(len(results[case]["lengths"]) > 1 for case in CASES) >= 2


@pytest.mark.parametrize("case", CASES)
def test_a_level_is_one_launch(results, case):
    """Beside it: the copy of what it reads, that of what it returns, and what the tree's policy asks."""
    pairs = [(eager, graphs) for eager, graphs in results[case]["cycles"] if graphs is not None]
    assert len(pairs) >= 5, "cycles in which nothing was captured"
    for eager, graphs in pairs:
        launches, passes = graphs["drafting"]
        assert launches <= 3 + 9 * passes, graphs
        assert eager["drafting"][0] >= launches + 40 * passes, (eager, graphs)
        assert graphs["reads"] == eager["reads"] and graphs["blocking"] == 0
        assert graphs["uploads"] <= eager["uploads"] + 1, "what the root's pass reads"


def test_a_whole_cycle_of_graphs(results):
    """Head and target: as many for any number of layers. Eager, they are 601 of six layers and three levels."""
    cycles = [graphs for _, graphs in results["sparrow static T=1"]["cycles"] if graphs is not None]
    assert all(graphs["launches"] <= 53 for graphs in cycles), cycles


def test_a_target_over_several_devices_has_none(results):
    assert results["spread"] == "the target lies on 2 devices"
