"""Cells and their tables: what is a line, what is a column, and what is compared."""

from pathlib import Path

import pytest
from draftsmith.eval import summary
from draftsmith.eval.cells import modes_line
from draftsmith.eval.measured_rows import PLAIN
from draftsmith.eval.report import MethodInfo, build
from draftsmith.eval.summary import summarize

from .rows import METHODS, measured_rows, random_rows


def test_the_common_table_has_every_cell_in_the_order_of_the_methods():
    report = build(measured_rows()[::-1], about={"device": "CPU"}, methods=METHODS)
    overview, table, *_ = report.tables
    assert overview.column("method") == ["M", "T", "EAGLE"]
    assert overview.column("clips tau")[0] == table.column("tau [95%]")[0][0]
    assert overview.column("identical") == [(12, 12)] * 3
    assert (
        table.column("method") == ["M", "T", "EAGLE"] * 2
        and table.column("benchmark") == ["clips"] * 3 + ["pictures"] * 3
    )
    assert [c.heading for c in table.columns] == [
        "benchmark", "method", "n", "identical", "tau [95%]", "tau per request", "accepted/cycle", "T_q/T_p",
        "expected", "TABED's Eq. 1", "DSR [IQR]", "ESR [IQR]", "prefill",
    ]  # fmt: skip
    one = summarize([r for r in measured_rows() if (r.method, r.benchmark) == ("M", "clips")])
    assert table.column("tau [95%]")[0] == (one.tau, *one.tau_interval)
    assert table.column("expected")[0] == one.expected_speedup and table.column("identical")[0] == (6, 6)


def test_temperatures_lengths_and_budgets_have_columns_where_they_differ():
    some = [
        *measured_rows(),
        *measured_rows(temperature=1.0, identical=False),
        *measured_rows(max_new_tokens=512, budget="25k", visual_tokens=25_089),
    ]
    table = build(some, about={}, methods=METHODS).tables[1]
    assert [c.heading for c in table.columns][:5] == ["benchmark", "visual tokens", "temperature", "new", "method"]
    warm = [row for row in table.rows if row[2] == 1.0]
    same = [column.heading for column in table.columns].index("identical")
    assert warm and all(row[same] is None for row in warm), "sampled outputs are not compared token by token"


def test_modes_are_explained_under_the_table_that_has_them():
    """Nothing in a report told what M and T are."""

    def told(mode):
        return build(random_rows(4), about={}, methods={"M": MethodInfo(mode=mode)}).tables[0].footnotes

    assert told("T") == ("Modes of a draft LVLM: T reads a newline in place of the picture.",)
    assert told("") == ()
    assert modes_line(["M", "MT*", "MTCP", "my own"]) == (
        "Modes of a draft LVLM: M sees the picture; P sees the picture pooled 2 x 2 before the projector; C reads a "
        "caption in place of the picture; T reads a newline in place of the picture; MT* mixes M, T by weights that "
        "follow what was accepted; MTCP mixes M, T, C, P equally."
    )


def test_whether_outputs_are_identical_is_seen_before_the_numbers():
    """At 1,400 pixels of width: the column stood last, behind two for each set, and a table scrolled to it."""
    report = build(measured_rows(), about={}, methods=METHODS)
    for table in report.tables[:2]:
        names = [column.name for column in table.columns]
        assert names.index("identical") < min(n for n, name in enumerate(names) if name.startswith("tau"))


def test_a_rule_that_nobody_has_shown_to_be_exact_counts_as_relaxed():
    assert not MethodInfo().relaxed and not MethodInfo(rule="block").relaxed
    assert MethodInfo(rule="my.rules:Loose").relaxed and not MethodInfo(rule="my.rules:Same", is_exact=True).relaxed


def test_a_relaxed_rule_is_not_held_to_plain_decoding():
    methods = {"M": MethodInfo(rule="lantern")}
    report = build(random_rows(4, identical=False), about={}, methods=methods)
    assert "not distributed as the target's" in report.tables[0].footnotes[0]
    assert report.tables[0].column("identical") == [None] and not any("differ" in line for line in report.findings)


def test_quality_of_drawn_pictures_stands_beside_speed():
    metric = {"what": "CLIP ViT-B/32", "n": 6, "value": 0.25, "spread": 0.01, "caution": "few"}
    quality = {0.0: {PLAIN: {"clip": metric | {"value": 0.3}}, "M": {"clip": metric}}}
    report = build(random_rows(6, medium="drawn"), about={}, methods={"M": MethodInfo("head")}, quality=quality)
    table = report.tables[0]
    assert table.column("method") == [PLAIN, "M"] and table.column("clip") == [0.3, 0.25]
    assert table.footnotes == ("clip: CLIP ViT-B/32, n = 6 (few)",)
    assert report.to_json()["quality"]["0"]["M"]["clip"]["spread"] == 0.01


def test_cycles_that_accept_a_draft_and_a_first_drafts_chance_have_a_name_each():
    """A report of drawn pictures holds both; words.md says what each counts, and nothing else is called so."""
    rows = [row for row in measured_rows() if (row.method, row.benchmark) == ("M", "clips")]
    built = build(rows, about={}, methods=METHODS)
    (table,) = (table for table in built.tables if table.title == "Cycles: trees and times")
    accepted = [count for row in rows for count in row.accepted]
    share = sum(count > 0 for count in accepted) / len(accepted)
    assert table.column("cycles with an accepted draft") == [pytest.approx(share)] and 0 < share < 1
    root = Path(summary.__file__).parents[1]
    words = (root / "docs" / "words.md").read_text()
    assert "| cycles with an accepted draft, `first_accepted` |" in words and "| first draft's chance |" in words
    assert not [path for path in (root / "eval").rglob("*.py") if "first draft accepted" in path.read_text()]
