"""Suite tables: what the cells, averages and marks are, against the article's own numbers."""

import json

import pytest
from draftsmith.eval.suite_table import FIRST, Plan, SetInfo, build, cell, mark, markdown, write

SETS = {name: SetInfo("benchmark") for name in ("LLaVA-W", "DocVQA", "POPE", "MMVet", "IEdit", "MB", "Spot")}
SETS |= {name: SetInfo("ood", "story") for name in ("PSV", "VIST")}
# TABED, table 10: taus of the first turn, their average, and the second turn's.
ARTICLE = {
    "M": [2.28, 2.15, 2.56, 2.21, 2.19, 1.96, 2.34, 2.24, 1.19, 1.16],
    "T": [2.19, 2.08, 2.31, 2.16, 2.23, 2.34, 2.27, 2.23, 2.05, 2.05],
    "MT": [2.25, 2.15, 2.47, 2.21, 2.31, 2.37, 2.40, 2.31, 1.94, 1.91],
    "MT*": [2.26, 2.16, 2.52, 2.21, 2.29, 2.39, 2.36, 2.31, 2.02, 2.04],
}


def rows(tau: float, name: str, mode: str, turn: str = FIRST, drafter: str = "68M", count: int = 2):
    """Requests whose tau is as asked for: 100 cycles each."""
    emitted = round(100 * tau)
    times = {"plain_total_s": 3.0, "plain_prefill_s": 1.0, "total_s": 2.0, "prefill_s": 1.0}
    return [
        {
            "drafter": drafter, "mode": mode, "set": name, "turn": turn, "request": f"r{i}",
            "emitted": emitted, "cycles": 100, "identical": True, **times,
        }
        for i in range(count)
    ]  # fmt: skip


def article_rows():
    found = []
    for mode, taus in ARTICLE.items():
        benchmark, ood = taus[:7], taus[8:]
        for name, tau in zip(SETS, (*benchmark, *ood), strict=True):
            found += rows(tau, name, mode)
            if SETS[name].group == "benchmark":
                found += rows(tau, name, mode, "next") + rows(tau + 0.5, name, mode, "story")
                found += rows(tau - 1, name, mode, "NQ")
    return found


@pytest.fixture(scope="module")
def built():
    plan = Plan(SETS, ("next", "story"), ("NQ",), ("68M",), tuple(ARTICLE))
    return build(article_rows(), plan, about={"temperature": 0.0}, notes=["a note"])


def test_averages_are_the_articles(built):
    table = built["tables"]["first"]
    assert table["columns"] == [*list(SETS)[:7], "Avg.", "PSV (story)", "VIST (story)"]
    for row in table["rows"]:
        # As printed, up to what rounding of the cells leaves open.
        assert row["values"] == pytest.approx(ARTICLE[row["mode"]], abs=0.0051)


def test_second_turns_are_means_over_tasks_and_questions_over_sets(built):
    table = built["tables"]["second"]
    assert table["columns"][-2:] == ["Avg.", "NQ"]
    first = built["tables"]["first"]
    for row, before in zip(table["rows"], first["rows"], strict=True):
        assert row["values"][:7] == pytest.approx([value + 0.25 for value in before["values"][:7]])
        assert row["values"][-1] == pytest.approx(before["values"][7] - 1)


def test_summary_has_the_averages_and_the_measured_speedup(built):
    table = built["tables"]["summary"]
    assert table["columns"] == ["First turn", "Second turn", "OOD", "DSR"]
    # Table 2 prints 1.18 for the mean of 1.19 and 1.16.
    assert table["rows"][0]["values"] == pytest.approx([2.241, 2.491, 1.175, 2.0], abs=0.001)


def test_best_and_second_best_of_each_column():
    marks = mark([[2.0, 1.0, None], [2.004, 3.0, 1.0], [1.9, 2.0, 2.0], [1.0, 2.0, 2.0]])
    # 2.00 and 2.004 print alike; so do the two seconds.
    assert [row[0] for row in marks] == ["best", "best", "second", ""]
    assert [row[1] for row in marks] == ["", "best", "second", "second"]
    assert [row[2] for row in marks] == ["", "second", "best", "best"]
    assert mark([[1.0], [1.0]]) == [[""], [""]]


def test_drafts_are_marked_apart():
    plan = Plan({"POPE": SetInfo("benchmark")}, (), (), ("68M", "160M"), ("M", "T"))
    found = [*rows(2.0, "POPE", "M"), *rows(1.5, "POPE", "T")]
    found += [*rows(3.0, "POPE", "M", drafter="160M"), *rows(4.0, "POPE", "T", drafter="160M")]
    table = build(found, plan, about={})["tables"]["first"]
    assert [row["marks"][0] for row in table["rows"]] == ["best", "second", "second", "best"]
    assert "second" not in build(found, plan, about={})["tables"]


def test_a_missing_set_leaves_no_average():
    plan = Plan({n: SetInfo("benchmark") for n in ("POPE", "DocVQA")}, (), (), ("68M",), ("M",))
    (row,) = build(rows(2.0, "POPE", "M"), plan, about={})["tables"]["first"]["rows"]
    assert row["values"] == [2.0, None, None]


def test_a_cell_pools_its_requests():
    some = [*rows(2.0, "POPE", "M", count=1), {**rows(3.0, "POPE", "M", count=1)[0], "request": "x", "cycles": 300}]
    found = cell(some)
    assert found["tau"] == pytest.approx((200 + 300) / 400)
    low, high = found["tau_interval"]
    assert low == pytest.approx(1.0) and high == pytest.approx(2.0)
    assert found["requests"] == 2 and cell(some[::-1]) == found


def test_what_does_not_hold_is_said():
    plan = Plan({"PSV": SetInfo("ood")}, (), (), ("68M",), ("M",))
    some = rows(2.0, "PSV", "M")
    some[0] |= {"identical": False, "beyond_positions": True}
    notes = " ".join(build(some, plan, about={"temperature": 0.0})["notes"])
    assert "Outputs differ" in notes and "beyond the draft's positions** in mode M: PSV (first)" in notes
    assert "identical" not in " ".join(build(some, plan, about={"temperature": 1.0})["notes"])


def test_files(built, tmp_path):
    write(tmp_path, built)
    assert json.loads((tmp_path / "suite.json").read_text())["cells"]["68M"]["M"]["POPE"]["first"]["requests"] == 2
    page = (tmp_path / "suite.md").read_text()
    assert page == markdown(built)
    assert "| 68M | MT* | <u>2.26</u> | **2.16** |" in page
    assert "- a note" in page and "Local stand-ins, not the published sets: PSV by story, VIST by story." in page
    assert (tmp_path / "suite.png").stat().st_size > 10_000
