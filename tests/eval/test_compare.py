"""Two trainings over seeds: pairs by place, Student's interval, and a reason where the difference is not above 0."""

import statistics

import pytest
from draftsmith.eval.compare import Comparison, compare_trainings, sentence
from pydantic import ValidationError

WAYS = Comparison(first=["new", "new_1", "new_2"], second=["old", "old_1", "old_2"])


def row(drafter: str, request: str, accepted: list[int], *, as_data: bool = False) -> dict:
    """Cycles of up to 3 drafted tokens."""
    return {
        "drafter": drafter, "request": request, "drafted": [3] * len(accepted), "accepted": accepted,
        "emitted": sum(accepted) + len(accepted), "cycles": len(accepted), "plain_is_data": as_data,
    }  # fmt: skip


def rows(gains: list[int], **settings) -> list[dict]:
    """Each old draft accepts 1 of 3 in ten cycles; pair by pair the new one accepts `gains` more in all of them."""
    found = []
    for old, new, gain in zip(WAYS.second, WAYS.first, gains, strict=True):
        for request in ("a", "b"):
            more = max(gain, 0) // 2, min(gain, 0) // 2
            accepted = [1] * 5
            for place in range(abs(gain) // 2):
                accepted[place] += 1 if gain > 0 else -1
            assert sum(accepted) == 5 + more[0] + more[1]
            found += [row(old, request, [1] * 5, **settings), row(new, request, accepted, **settings)]
    return found


def test_the_interval_is_student_s_over_pairs():
    found = compare_trainings(rows([2, 4, 6]), WAYS, gamma=3)
    each = [0.2, 0.4, 0.6]
    assert list(found["each"]) == ["new - old", "new_1 - old_1", "new_2 - old_2"]
    assert list(found["each"].values()) == pytest.approx(each)
    half = 4.303 * statistics.stdev(each) / 3**0.5
    assert found["interval"] == pytest.approx((0.4 - half, 0.4 + half))
    assert found["by_depth"]["second"][0] == 1.0 and found["by_depth"]["second"][1] == 0.0
    assert found["by_depth"]["first"][1] == pytest.approx(0.4)


def test_the_order_of_the_lists_makes_the_pairs():
    crossed = Comparison(first=["new_2", "new", "new_1"], second=["old", "old_1", "old_2"])
    data = rows([2, 4, 6])
    for one in data:  # old_1 and old_2 are better than old
        if one["drafter"] == "old_1":
            one["accepted"], one["emitted"] = [2] * 5, 15
    found = compare_trainings(data, crossed, gamma=3)
    assert found["each"] == pytest.approx({"new_2 - old": 0.6, "new - old_1": 0.2 - 1.0, "new_1 - old_2": 0.4})


def test_a_clear_gain_needs_no_excuse():
    found = compare_trainings(rows([6, 6, 8]), WAYS, gamma=3)
    assert found["interval"][0] > 0 and found["verdict"] == "above 0" and found["why"] == []
    line = sentence("pictures", "M", found)
    assert "above 0" in line and "Not shown" not in line and "tau +0.667" in line


@pytest.mark.parametrize(
    ("gains", "says"),
    [
        ([2, 4, 8], "seeds that differ by 0.306 (standard deviation) cannot tell +0.467 from 0; 5 would do"),
        ([-8, 2, 10], "even 30 would not do"),
        ([-2, -4, 2], "on average the first accept no more (1 of 3 seeds do)"),
        ([-4, -4, -4], "on average the first accept no more (0 of 3 seeds do)"),
        ([0, 0, 0], "on average the first accept no more (0 of 3 seeds do)"),
    ],
)
def test_no_gain_is_said_with_its_reasons(gains, says):
    found = compare_trainings(rows(gains, as_data=True), WAYS, gamma=3)
    assert found["interval"][0] <= 0
    line = sentence("pictures", "M", found)
    assert "**Not shown to be above 0**" in line and says in line
    assert "accepted of the drafts reached, by depth: 1:" in line
    assert "the data's, word for word, in 100.0% of the requests: the two learned nearly the same text" in line
    other = compare_trainings(rows(gains), WAYS, gamma=3)
    assert other["why"][-1].endswith("in 0.0% of the requests")


@pytest.mark.parametrize(
    "lists",
    [
        {"first": ["a", "b"], "second": ["c"]},
        {"first": ["a"], "second": ["b"]},
        {"first": ["a", "b"], "second": ["b", "c"]},
    ],
)
def test_lists_that_make_no_pairs(lists):
    with pytest.raises(ValidationError):
        Comparison(**lists)
