"""The report of any target's evaluation: its table, findings, files; and what does not hold is said."""

import dataclasses
import json

import pytest
from draftsmith.core.errors import UserError
from draftsmith.eval.report import Comparison, MethodInfo, build, write
from draftsmith.eval.rows import PLAIN, read_rows
from draftsmith.eval.summary import summarize
from draftsmith.eval.tables import Figure, ReportSection

from .rows import a_row, random_rows

METHODS = {
    "M": MethodInfo("finetune", "M", "chain of 5", 5),
    "T": MethodInfo("finetune", "T", "chain of 5", 5),
    "EAGLE": MethodInfo("eagle", tree="30-4-8", levels=4),
}


def rows(**changes):
    """Three methods on two sets."""
    values = {"identical": True, **changes}
    of = {"drafter": "finetune", "benchmark": "pictures", **values}
    found = []
    for benchmark in ("pictures", "clips"):
        found += random_rows(6, seed=1, **(of | {"method": "M", "mode": "M", "benchmark": benchmark}))
        found += random_rows(6, seed=2, **(of | {"method": "T", "mode": "T", "benchmark": benchmark}))
        found += random_rows(6, seed=3, **(of | {"method": "EAGLE", "drafter": "eagle", "benchmark": benchmark}))
    return found


def test_the_common_table_has_every_cell_in_the_order_of_the_methods():
    found = build(rows()[::-1], about={"device": "CPU"}, methods=METHODS)
    table = found.tables[0]
    assert (
        table.column("method") == ["M", "T", "EAGLE"] * 2
        and table.column("benchmark") == ["clips"] * 3 + ["pictures"] * 3
    )
    assert [c.heading for c in table.columns] == [
        "benchmark", "method", "n", "tau [95%]", "tau per request", "accepted/cycle", "T_q/T_p", "expected",
        "TABED's Eq. 1", "DSR [IQR]", "ESR [IQR]", "prefill", "identical",
    ]  # fmt: skip
    one = summarize([r for r in rows() if (r.method, r.benchmark) == ("M", "clips")])
    assert table.column("tau [95%]")[0] == (one.tau, *one.tau_interval)
    assert table.column("expected")[0] == one.expected_speedup and table.column("identical")[0] == (6, 6)


def test_temperatures_lengths_and_budgets_have_columns_where_they_differ():
    some = [
        *rows(),
        *rows(temperature=1.0, identical=False),
        *rows(max_new_tokens=512, budget="25k", visual_tokens=25_089),
    ]
    table = build(some, about={}, methods=METHODS).tables[0]
    assert [c.heading for c in table.columns][:5] == ["benchmark", "visual tokens", "T", "new", "method"]
    warm = [row for row in table.rows if row[2] == 1.0]
    assert warm and all(row[-1] is None for row in warm), "sampled outputs are not compared token by token"


def test_findings_say_what_holds():
    told = build(rows(total_s=0.2, prefill_s=0.1), about={}, methods=METHODS).findings
    assert told[0].startswith("Best tau: ") and "Best measured speedup of decoding: " in told[1]
    assert "Greedy outputs are identical to plain decoding, every token of 36 decoded requests." in told
    assert any(line.startswith("pictures: tau with the picture minus without is ") for line in told)
    binding = {"questions": 20, "accuracy": 0.9, "blind_accuracy": 0.25}
    assert "in 90.0% of 20 held-out questions" in " ".join(
        build(rows(), about={}, methods=METHODS, binding=binding).findings
    )


def test_findings_say_what_does_not_hold():
    bad = [dataclasses.replace(r, identical=r.request != "r2", details={"beyond_positions": r.request == "r1"})
           for r in rows(total_s=9.0)]  # fmt: skip
    bad += [a_row(method="dead", accepted=(0, 0), benchmark="pictures", total_s=9.0)]
    told = " ".join(build(bad, about={}, methods=METHODS).findings)
    assert "**No wall-clock gain on this machine**" in told and "first at r2" in told
    assert "**Outputs differ** from plain decoding in 6 of 7 greedy cells: M, pictures" in told
    assert "**2 of 12 requests of pictures, clips go beyond the draft's positions** in M" in told
    assert "Nothing accepted, or nothing rejected, in: dead, pictures." in told


def test_a_relaxed_rule_is_not_held_to_plain_decoding():
    methods = {"M": MethodInfo(rule="lantern")}
    found = build(random_rows(4, identical=False), about={}, methods=methods)
    assert "not distributed as the target's" in found.tables[0].footnotes[0]
    assert found.tables[0].column("identical") == [None] and not any("differ" in line for line in found.findings)


def test_lengths_of_clips_are_compared_in_the_longest_answers():
    some = [
        a_row(budget=budget, visual_tokens=tokens, max_new_tokens=new, accepted=(a,) * 4, medium="video")
        for budget, tokens in (("0.5k", 500), ("25k", 25_089))
        for new, a in ((512, 2), (2048, 3))
    ]
    told = [line for line in build(some, about={}, methods=METHODS).findings if "visual tokens, " in line]
    expected = "tau 4.00 [4.00, 4.00] at 500 visual tokens, 4.00 [4.00, 4.00] at 25,089."
    assert told == [f"M, photos, T = 0: {expected}"]


def test_quality_of_drawn_pictures_stands_beside_speed():
    metric = {"what": "CLIP ViT-B/32", "n": 6, "value": 0.25, "spread": 0.01, "caution": "few"}
    quality = {0.0: {PLAIN: {"clip": metric | {"value": 0.3}}, "M": {"clip": metric}}}
    found = build(random_rows(6, medium="drawn"), about={}, methods=METHODS, quality=quality)
    table = found.tables[0]
    assert table.column("method") == [PLAIN, "M"] and table.column("clip") == [0.3, 0.25]
    assert table.footnotes == ("clip: CLIP ViT-B/32, n = 6 (few)",)
    assert found.to_json()["quality"]["0"]["M"]["clip"]["spread"] == 0.01


def test_drafters_of_one_method_and_contrasts_have_tables():
    some = [*rows(), *(dataclasses.replace(r, drafter="seed_1") for r in rows() if r.mode)]
    found = build(some, about={}, methods=METHODS, contrasts={"another seed": ("seed_1", "finetune")})
    assert [t.title for t in found.tables] == ["Every cell", "A cycle", "Drafter by drafter", "What a change does"]
    assert "over 2 drafters" in " ".join(found.findings)
    assert {one["name"] for one in found.to_json()["contrasts"]} == {"another seed"}


def test_two_trainings_over_seeds_are_compared():
    names = ("new", "new_1", "old", "old_1")
    some = [dataclasses.replace(r, drafter=name) for name in names for r in rows() if r.mode == "M"]
    ways = Comparison(first=["new", "new_1"], second=["old", "old_1"])
    found = build(some, about={}, methods=METHODS, compare=ways)
    assert list(found.to_json()["comparison"]) == ["pictures, mode M", "clips, mode M"]
    assert any(line.startswith("pictures, mode M, first trainings less second: tau +0.000") for line in found.findings)


def test_files(tmp_path):
    section = ReportSection("Where heads look", (Figure("a.png", "Shares."),), "attention", {"M": 0.5})
    found = build(rows(), about={"device": "CPU"}, methods=METHODS).with_sections(section)
    write(tmp_path, found, rows())
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["version"] == 2 and data["about"] == {"device": "CPU"} and data["sections"][0]["data"] == {"M": 0.5}
    cell = data["cells"][0]
    assert cell["benchmark"] == "pictures" and cell["requests"] == 6 and len(cell["tau_interval"]) == 2
    page = (tmp_path / "report.md").read_text()
    wanted = ["# Speculative decoding, measured", "| pictures | M | 6 |", "## Where heads look", "![Shares.](a.png)"]
    wanted += ["- device: CPU", "- EAGLE: drafter eagle, tree 30-4-8", "![Share accepted by depth.](acceptance.png)"]
    for words in wanted:
        assert words in page, words
    assert page.index("## Every cell") < page.index("## Where heads look")
    assert len(read_rows(tmp_path / "rows.jsonl")) == 36
    for name in ("acceptance.png", "speedup.png"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_many_cells_stand_behind_the_sections(tmp_path):
    some = [a_row(benchmark=f"set {n}", turn="first", mode="M") for n in range(50)]
    found = build(some, about={}, methods={}, sections=[ReportSection("Suite", ("words",))])
    write(tmp_path, found, some)
    page = (tmp_path / "report.md").read_text()
    assert page.index("## Suite") < page.index("## Every cell") and "| set 3 | first | M |" in page


def test_rows_of_another_version_name_their_file(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"request": "r"}\n')
    with pytest.raises(UserError, match="version"):
        read_rows(tmp_path / "rows.jsonl")
