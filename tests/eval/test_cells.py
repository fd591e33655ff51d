"""Cells and their tables: what is a line, what is a column, and what is compared."""

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


def test_a_rule_that_nobody_has_shown_to_be_exact_counts_as_relaxed():
    assert not MethodInfo().relaxed and not MethodInfo(rule="block").relaxed
    assert MethodInfo(rule="my.rules:Loose").relaxed and not MethodInfo(rule="my.rules:Same", is_exact=True).relaxed


def test_a_relaxed_rule_is_not_held_to_plain_decoding():
    methods = {"M": MethodInfo(rule="lantern")}
    report = build(random_rows(4, identical=False), about={}, methods=methods)
    assert "not distributed as the target's" in report.tables[0].footnotes[0]
    assert report.tables[0].column("identical") == [None] and not any("differ" in line for line in report.findings)
    assert report.tables[0].column("rule") == ["lantern (relaxed)"] and "LANTERN" not in report.tables[0].footnotes[0]


def test_rows_of_exact_and_relaxed_rules_are_told_apart_where_both_are_sampled():
    methods = METHODS | {"T": MethodInfo(rule="my.rules:Loose"), "EAGLE": MethodInfo(rule="block")}
    report = build(measured_rows(temperature=1.0, identical=False), about={}, methods=methods)
    rules = ["exact", "my.rules:Loose (relaxed)", "block"]
    assert report.tables[0].column("rule") == rules and report.tables[1].column("rule") == rules * 2
    assert [cell["rule"] for cell in report.to_json()["cells"]] == [methods[name].rule for name in METHODS] * 2


def test_quality_of_drawn_pictures_stands_beside_speed():
    metric = {"what": "CLIP ViT-B/32", "n": 6, "value": 0.25, "spread": 0.01, "caution": "few"}
    quality = {0.0: {PLAIN: {"clip": metric | {"value": 0.3}}, "M": {"clip": metric}}}
    report = build(random_rows(6, medium="drawn"), about={}, methods={"M": MethodInfo("head")}, quality=quality)
    table = report.tables[-1]
    assert table.column("method") == [PLAIN, "M"] and table.column("clip") == [0.3, 0.25]
    assert table.footnotes == ("clip: CLIP ViT-B/32, n = 6 (few)",)
    assert report.to_json()["quality"]["0"]["M"]["clip"]["spread"] == 0.01
