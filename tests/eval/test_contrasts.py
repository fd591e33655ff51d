"""What a change does: drafters side by side, contrasts paired by request, and two trainings over seeds."""

import statistics
from dataclasses import replace

import pytest
from draftsmith.eval.cells import placed
from draftsmith.eval.contrasts import (
    Comparison,
    contrasts_of,
    differences,
    drafters_table,
    mode_differences,
    trainings_of,
)
from draftsmith.eval.measured_rows import frame
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


def placed_rows(*rows):
    return placed(frame([row for some in rows for row in some]))


def test_each_drafter_has_its_own_numbers():
    table = drafters_table(placed_rows(ROWS))
    assert [row[:2] for row in table.rows] == [("few", "M"), ("many", "M"), ("few", "T"), ("many", "T")]
    alone = summarize(drafted("few", 12, benchmark="five", beyond=True))
    assert table.rows[0][3] == (alone.tau, *alone.tau_interval) and table.rows[0][-1] == (4, 8)
    assert [c.heading for c in table.columns[2:4]] == ["one", "five"], "a column for each place, none left out"
    assert alone.beyond_positions == 4 and summarize(drafted("few", 30)).beyond_positions == 0
    assert [row[-1] for row in table.rows[1:]] == [(0, 8)] * 3
    page = markdown(table)
    assert "| drafter | method | one | five | beyond positions |" in page
    assert any(line.startswith("| few | M | 3.15 [") and line.endswith("| 4/8 |") for line in page)
    assert drafters_table(placed_rows(row for row in ROWS if row.drafter == "few")) is None


def test_a_contrast_is_the_first_less_the_second_on_the_same_requests():
    actual = contrasts_of(placed_rows(ROWS), {"more positions": ("many", "few")})
    values = {(one.place, one.mode): one.result for one in actual}
    assert values["five", "M"].difference == pytest.approx(1.8) and values["five", "M"].verdict == "above 0"
    assert values["one", "T"].difference == pytest.approx(0) and values["one", "T"].verdict == "includes 0"
    assert values["one", "T"].requests == values["five", "M"].requests == 4
    assert values["five", "M"] == paired_difference(drafted("many", 30), drafted("few", 12))
    assert contrasts_of(placed_rows(ROWS), {}) == contrasts_of(placed_rows(ROWS), {"gone": ("many", "absent")}) == []
    page = markdown(differences(placed_rows(ROWS), {"more positions": ("many", "few")}, None)[1])
    assert (
        "| change | measured on | tau \\[95%] | over |" in page or "| change | measured on | tau [95%] | over |" in page
    )
    assert any(line.startswith("| more positions | five, mode M | +1.800 [") for line in page)


def test_methods_are_contrasted_too():
    rows = [*drafted("a", 30, mode="", method="EAGLE-3"), *drafted("b", 25, mode="", method="EAGLE")]
    for pair in (("EAGLE-3", "EAGLE"), ("a", "b")):
        (one,) = contrasts_of(placed_rows(rows), {"training test": pair})
        assert one.result.difference == pytest.approx(0.5) and one.mode == ""
    # A drafter under two trees: its methods are told apart.
    rows = [
        row for d, e in (("a", 30), ("b", 25)) for m in ("chain", "tree") for row in drafted(d, e, mode="", method=m)
    ]
    assert [one.mode for one in contrasts_of(placed_rows(rows), {"x": ("a", "b")})] == ["chain", "tree"]


def test_methods_of_two_modes_are_contrasted_as_they_are():
    (one,) = contrasts_of(placed_rows(drafted("few", 30), drafted("few", 25, mode="T")), {"the picture": ("M", "T")})
    assert one.result.difference == pytest.approx(0.5) and (one.mode, one.result.requests) == ("", 4)


def test_seeing_less_blind_pairs_by_drafter():
    (result, seeds) = mode_differences(placed_rows(ROWS))["five"]
    assert result.requests == 4 and result.difference == pytest.approx((1.35 + 3.15 - 2.55 - 2.65) / 2)
    assert list(seeds.each) == ["few", "many"] and seeds.each["many"] == pytest.approx(0.5)
    other_tree = drafted("few", 20, benchmark="five", method="M, tree")
    assert "five" not in mode_differences(placed_rows(ROWS, other_tree)), (
        "two methods see: it is not said which is meant"
    )
    lines = [line for line in differences(placed_rows(ROWS), {}, None)[1].rows if line[1] == "five"]
    assert [line[-1] for line in lines] == ["4 requests", "2 drafters"]


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
    (place, (seeds, same)), *more = trainings_of(placed_rows(trained([2, 4, 6], plain_is_data=True)), WAYS).items()
    each = [0.2, 0.4, 0.6]
    assert place == "photos, mode M" and not more
    assert list(seeds.each) == ["new - old", "new_1 - old_1", "new_2 - old_2"]
    assert list(seeds.each.values()) == pytest.approx(each)
    half = 4.303 * statistics.stdev(each) / 3**0.5
    assert seeds.interval == pytest.approx((0.4 - half, 0.4 + half)) and seeds.verdict == "includes 0"
    assert same == 1.0
    data, table = differences(placed_rows(trained([2, 4, 6], plain_is_data=True)), {}, WAYS)
    assert data["comparison"][place]["mean"] == pytest.approx(0.4)
    page = "\n".join(markdown(table))
    assert "| first trainings - second | photos, mode M | +0.400 [" in page and "3 pairs: new - old +0.200" in page


def test_the_order_of_the_lists_makes_the_pairs():
    crossed = Comparison(first=["new_2", "new", "new_1"], second=["old", "old_1", "old_2"])
    better = [a_row(request=r, drafter="old_1", gamma=3, accepted=[2] * 5, mode="M") for r in ("a", "b")]
    rows = [row for row in trained([2, 4, 6]) if row.drafter != "old_1"]
    result = trainings_of(placed_rows(rows, better), crossed)["photos, mode M"][0]
    assert result.each == pytest.approx({"new_2 - old": 0.6, "new - old_1": 0.2 - 1.0, "new_1 - old_2": 0.4})


def test_trainings_measured_by_different_methods_are_compared():
    rows = [replace(row, method="tree" if row.drafter in WAYS.first else "chain") for row in trained([2, 4, 6])]
    assert trainings_of(placed_rows(rows), WAYS)["photos, mode M"][0].mean == pytest.approx(0.4)


@pytest.mark.parametrize(("first", "second"), [(["a", "b"], ["c"]), (["a"], ["b"]), (["a", "b"], ["b", "c"])])
def test_lists_that_make_no_pairs(first, second):
    with pytest.raises(ValidationError):
        Comparison(first=first, second=second)
    assert Comparison(first=["a", "b"], second=["c", "d"]), "two seeds do"
