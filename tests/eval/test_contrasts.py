"""What a change does: drafters side by side, contrasts paired by request, and two trainings over seeds."""

import statistics

import pytest
from draftsmith.eval.contrasts import (
    Comparison,
    compare_trainings,
    contrasts_of,
    contrasts_table,
    drafters_table,
    mode_differences,
    sentence,
    trainings_of,
)
from draftsmith.eval.row_columns import Rows
from draftsmith.eval.summary import paired_difference, summarize
from draftsmith.eval.tables import markdown
from pydantic import ValidationError

from .rows import a_row

WAYS = Comparison(first=["new", "new_1", "new_2"], second=["old", "old_1", "old_2"])


def drafted(drafter, emitted, *, benchmark="one", mode="M", method=None, beyond=False):
    """Ten cycles a request that emit `emitted` tokens and a few more."""
    return [
        a_row(request=f"r{n}", drafter=drafter, benchmark=benchmark, mode=mode, method=method or mode,
              accepted=(1,) * 10, emitted=(*(1,) * 9, emitted + n - 9), details={"beyond_positions": beyond})
        for n in range(4)
    ]  # fmt: skip


ROWS = [
    *drafted("few", 30), *drafted("many", 32), *drafted("few", 25, mode="T"), *drafted("many", 25, mode="T"),
    *drafted("few", 12, benchmark="five", beyond=True), *drafted("many", 30, benchmark="five"),
    *drafted("few", 24, benchmark="five", mode="T"), *drafted("many", 25, benchmark="five", mode="T"),
]  # fmt: skip


def where(row):
    return row.benchmark


def test_each_drafter_has_its_own_numbers():
    table = drafters_table(Rows(ROWS), where)
    assert [row[:2] for row in table.rows] == [("few", "M"), ("many", "M"), ("few", "T"), ("many", "T")]
    alone = summarize(drafted("few", 12, benchmark="five", beyond=True))
    assert table.rows[0][3] == (alone.tau, *alone.tau_interval) and table.rows[0][-1] == (4, 8)
    assert [c.heading for c in table.columns[2:4]] == ["one", "five"], "a column for each place, none left out"
    assert alone.beyond_positions == 4 and summarize(drafted("few", 30)).beyond_positions == 0
    assert [row[-1] for row in table.rows[1:]] == [(0, 8)] * 3
    page = markdown(table)
    assert "| drafter | method | one | five | beyond positions |" in page
    assert any(line.startswith("| few | M | 3.15 [") and line.endswith("| 4/8 |") for line in page)
    assert drafters_table(Rows(row for row in ROWS if row.drafter == "few"), where) is None


def test_a_contrast_is_the_first_less_the_second_on_the_same_requests():
    actual = contrasts_of(Rows(ROWS), {"more positions": ("many", "few")}, where)
    values = {(one.place, one.mode): one.result for one in actual}
    assert values["five", "M"].difference == pytest.approx(1.8) and values["five", "M"].verdict == "above 0"
    assert values["one", "T"].difference == pytest.approx(0) and values["one", "T"].verdict == "includes 0"
    assert values["one", "T"].requests == values["five", "M"].requests == 4
    assert values["five", "M"] == paired_difference(drafted("many", 30), drafted("few", 12))
    page = markdown(contrasts_table(actual))
    assert any(line.startswith("| more positions | M | +0.20 [") and "+1.80 [" in line for line in page)
    assert "| change | mode | five | one |" in markdown(contrasts_table(actual, ["five", "absent", "one"]))
    assert (
        contrasts_of(Rows(ROWS), {}, where) == []
        and contrasts_of(Rows(ROWS), {"gone": ("many", "absent")}, where) == []
    )


def test_methods_are_contrasted_too():
    rows = [*drafted("a", 30, mode="", method="EAGLE-3"), *drafted("b", 25, mode="", method="EAGLE")]
    for pair in (("EAGLE-3", "EAGLE"), ("a", "b")):
        (one,) = contrasts_of(Rows(rows), {"training test": pair}, where)
        assert one.result.difference == pytest.approx(0.5) and one.mode == ""
        assert "| change | one |" in markdown(contrasts_table([one])), "heads have no modes"
    # A drafter under two trees: its methods are told apart.
    rows = [
        row for d, e in (("a", 30), ("b", 25)) for m in ("chain", "tree") for row in drafted(d, e, mode="", method=m)
    ]
    assert [one.mode for one in contrasts_of(Rows(rows), {"x": ("a", "b")}, where)] == ["chain", "tree"]


def test_seeing_less_blind_pairs_by_drafter():
    (result, seeds) = mode_differences(Rows(ROWS), where)["five"]
    assert result.requests == 8 and result.difference == pytest.approx((1.35 + 3.15 - 2.55 - 2.65) / 2)
    assert list(seeds.each) == ["few", "many"] and seeds.each["many"] == pytest.approx(0.5)
    other_tree = [row for row in drafted("few", 20, benchmark="five", method="M, tree")]
    assert "five" not in mode_differences(Rows(ROWS + other_tree), where), (
        "two methods see: it is not said which is meant"
    )


def trained(gains, **details):
    """Each old drafter accepts 1 of 3 in ten cycles; pair by pair the new one accepts `gains` more in all of them."""
    rows = []
    for old, new, gain in zip(WAYS.second, WAYS.first, gains, strict=True):
        for request in ("a", "b"):
            accepted = [1] * 5
            for place in range(abs(gain) // 2):
                accepted[place] += 1 if gain > 0 else -1
            rows += [a_row(request=request, drafter=d, gamma=3, accepted=a, details=details, mode="M")
                     for d, a in ((old, [1] * 5), (new, accepted))]  # fmt: skip
    return rows


def test_the_interval_is_students_over_pairs():
    result = compare_trainings(Rows(trained([2, 4, 6])), WAYS)
    each, seeds = [0.2, 0.4, 0.6], result.difference
    assert list(seeds.each) == ["new - old", "new_1 - old_1", "new_2 - old_2"]
    assert list(seeds.each.values()) == pytest.approx(each)
    half = 4.303 * statistics.stdev(each) / 3**0.5
    assert seeds.interval == pytest.approx((0.4 - half, 0.4 + half))
    assert result.by_depth["second"][0] == 1.0 and result.by_depth["second"][1] == 0.0
    assert result.by_depth["first"][1] == pytest.approx(0.4)
    assert list(trainings_of(Rows(trained([2, 4, 6])), WAYS, where)) == ["photos, mode M"]
    assert result.to_json()["mean"] == pytest.approx(0.4) and "why" in result.to_json()


def test_the_order_of_the_lists_makes_the_pairs():
    crossed = Comparison(first=["new_2", "new", "new_1"], second=["old", "old_1", "old_2"])
    better = [a_row(request=r, drafter="old_1", gamma=3, accepted=[2] * 5, mode="M") for r in ("a", "b")]
    rows = [row for row in trained([2, 4, 6]) if row.drafter != "old_1"] + better
    result = compare_trainings(Rows(rows), crossed).difference
    assert result.each == pytest.approx({"new_2 - old": 0.6, "new - old_1": 0.2 - 1.0, "new_1 - old_2": 0.4})


def test_a_clear_gain_needs_no_excuse():
    result = compare_trainings(Rows(trained([6, 6, 8])), WAYS)
    assert result.difference.interval[0] > 0 and result.difference.verdict == "above 0" and result.why == ()
    line = sentence("pictures, mode M", result)
    assert "above 0" in line and "Not shown" not in line and "tau +0.667" in line


@pytest.mark.parametrize(("gains", "says"), [
    ([2, 4, 8], "seeds with a standard deviation of 0.306 cannot distinguish +0.467 from 0; 5 seeds would suffice"),
    ([-8, 2, 10], "even 30 seeds would not suffice"),
    ([-2, -4, 2], "on average the first trainings accept no more (they do with 1 of 3 seeds)"),
    ([-4, -4, -4], "on average the first trainings accept no more (they do with 0 of 3 seeds)"),
    ([0, 0, 0], "on average the first trainings accept no more (they do with 0 of 3 seeds)"),
])  # fmt: skip
def test_no_gain_is_said_with_its_reasons(gains, says):
    result = compare_trainings(Rows(trained(gains, plain_is_data=True)), WAYS)
    line = sentence("pictures", result)
    assert result.difference.interval[0] <= 0 and "**Not shown to be above 0**" in line and says in line
    assert "accepted of the drafts that were reached, by depth: 1:" in line
    assert "the data's word for word in 100.0% of the requests, so the two trainings saw nearly the same text" in line
    assert compare_trainings(Rows(trained(gains)), WAYS).why[-1].endswith("in 0.0% of the requests")


@pytest.mark.parametrize(("first", "second"), [(["a", "b"], ["c"]), (["a"], ["b"]), (["a", "b"], ["b", "c"])])
def test_lists_that_make_no_pairs(first, second):
    with pytest.raises(ValidationError):
        Comparison(first=first, second=second)
    assert Comparison(first=["a", "b"], second=["c", "d"]), "two seeds do"
