"""Suite tables: what the cells, averages and marks are, against the article's own numbers."""

import pytest
from draftsmith.eval.summary import summarize
from draftsmith.eval.tabed_tables import FIRST, Plan, SetInfo, tables

from .rows import a_row

SETS = {name: SetInfo("benchmark") for name in ("LLaVA-W", "DocVQA", "POPE", "MMVet", "IEdit", "MB", "Spot")}
SETS |= {name: SetInfo("ood", "story") for name in ("PSV", "VIST")}
# TABED, table 10: taus of the first turn, their average, and the second turn's.
ARTICLE = {
    "M": [2.28, 2.15, 2.56, 2.21, 2.19, 1.96, 2.34, 2.24, 1.19, 1.16],
    "T": [2.19, 2.08, 2.31, 2.16, 2.23, 2.34, 2.27, 2.23, 2.05, 2.05],
    "MT": [2.25, 2.15, 2.47, 2.21, 2.31, 2.37, 2.40, 2.31, 1.94, 1.91],
    "MT*": [2.26, 2.16, 2.52, 2.21, 2.29, 2.39, 2.36, 2.31, 2.02, 2.04],
}


def rows(tau, name, method, turn=FIRST, drafter="68M", **more):
    """Two requests whose tau is as asked for: 100 cycles each."""
    emitted = round(100 * tau)
    times = {"plain_total_s": 3.0, "plain_prefill_s": 1.0, "total_s": 2.0, "prefill_s": 1.0}
    return [
        a_row(request=f"r{i}", benchmark=name, method=method, mode=method, turn=turn, drafter=drafter,
              accepted=(1,) * 100, emitted=(*(1,) * 99, emitted - 99), **(times | more))
        for i in range(2)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def article():
    result = []
    for method, taus in ARTICLE.items():
        # M's verification takes half as long again as a plain step.
        more = {"verify_s": 0.03} if method == "M" else {}
        for name, tau in zip(SETS, (*taus[:7], *taus[8:]), strict=True):
            result += rows(tau, name, method, **more)
            if SETS[name].group == "benchmark":
                result += rows(tau, name, method, "next") + rows(tau + 0.5, name, method, "story")
                result += rows(tau - 1, name, method, "NQ")
    return result


PLAN = Plan(SETS, ("next", "story"), ("NQ",), ("68M",), tuple(ARTICLE))


def test_averages_are_the_articles(article):
    first, second, _ = tables(article, PLAN)
    assert [c.heading for c in first.columns[2:]] == [*list(SETS)[:7], "Avg.", "OOD PSV (story)", "OOD VIST (story)"]
    for line in first.rows:
        # As printed, up to what rounding of the cells leaves open.
        assert line[2:] == pytest.approx(ARTICLE[line[1]], abs=0.0051)
    assert [c.heading for c in second.columns[-2:]] == ["Avg.", "NLP NQ"]
    for line, before in zip(second.rows, first.rows, strict=True):
        assert line[2:9] == pytest.approx([value + 0.25 for value in before[2:9]])
        assert line[-1] == pytest.approx(before[9] - 1)


def test_averages_stand_beside_expected_and_measured_speedups(article):
    table = tables(article, PLAN)[-1]
    assert [c.heading for c in table.columns[2:]] == [
        "First turn", "Second turn", "OOD", "T_q/T_p", "Eq. 1", "expected", "DSR",
    ]  # fmt: skip
    # Table 2 prints 1.18 for the mean of 1.19 and 1.16.
    assert table.rows[0][2:5] == pytest.approx((2.241, 2.491, 1.175), abs=0.001)
    first = summarize([row for row in article if row.method == "M" and row.turn == FIRST])
    ratio, gamma = 0.005 / 0.02, 5
    # By hand: (3 - 1) s of plain decoding and (2 - 1) s of drafting for as many tokens.
    assert table.rows[0][-1] == pytest.approx(2.0)
    assert table.rows[0][5:] == pytest.approx(
        (ratio, first.tau / (gamma * ratio + 1), first.tau / (gamma * ratio + 1.5), first.DSR)
    )
    assert table.rows[1][6] == pytest.approx(table.rows[1][7]), "of T a verification costs a step, and both agree"


def test_a_missing_set_leaves_no_average():
    plan = Plan({n: SetInfo("benchmark") for n in ("POPE", "DocVQA")}, (), (), ("68M",), ("M",))
    assert tables(rows(2.0, "POPE", "M"), plan)[0].rows == (("68M", "M", 2.0, None, None),)
