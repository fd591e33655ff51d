"""Tables of the video track against numbers that the articles print, and what they say of what does not hold."""

import json

import pytest
from draftsmith.eval import reading_report
from draftsmith.eval import video_tables as t
from draftsmith.eval.loop import Cycle, Generation
from draftsmith.eval.measure import measure_request, time_parts


def request(drafter, name="r0", *, calls=100, emitted=388, plain=28.4, decode=10.0, prefill=11.46, **more):
    """A request of `calls` verification passes; plain decoding takes `plain` seconds, all but the prefill's."""
    accepted = [emitted // calls - 1] * calls
    accepted[0] += emitted - calls - sum(accepted)
    return {
        "request": name, "drafter": drafter, "set": "VideoDetailCaption", "temperature": 0.0, "budget": "25k",
        "visual_tokens": 25_089, "max_new_tokens": 512, "identical": True, "stop": "length", "emitted": emitted,
        "cycles": calls, "accepted": accepted, "plain_tokens": emitted + 1, "plain_total_s": plain + prefill,
        "plain_prefill_s": prefill, "total_s": decode + prefill, "prefill_s": prefill, "draft_s": 0.002,
    } | more  # fmt: skip


# Sparrow, table 2: tau, ESR and DSR of each set and on average.
TABLE_2 = {
    "SpecVLM": [4.15, 1.25, 1.47, 4.20, 1.26, 1.43, 4.04, 1.23, 1.39, 3.91, 1.21, 1.34, 4.07, 1.24, 1.41],
    "MSD": [2.69, 1.47, 1.76, 2.65, 1.43, 1.71, 2.63, 1.43, 1.71, 2.68, 1.49, 1.77, 2.66, 1.46, 1.74],
    "Sparrow": [3.88, 1.96, 2.84, 3.67, 1.83, 2.69, 3.78, 1.90, 2.77, 3.98, 2.02, 2.96, 3.83, 1.93, 2.82],
}
SETS = ("VideoDetailCaption", "MVBench", "LongVideoBench", "VideoMME")


def table_2_rows():
    """Requests with these numbers: decoding takes a second, and the prefill what ESR asks for."""
    rows = []
    for drafter, values in TABLE_2.items():
        for place, name in enumerate(SETS):
            tau, esr, dsr = values[3 * place : 3 * place + 3]
            prefill = (dsr - esr) / (esr - 1)  # (dsr + prefill) / (1 + prefill) = esr
            rows.append(request(drafter, emitted=round(100 * tau), plain=dsr, decode=1.0, prefill=prefill, set=name))
    return rows


def test_sparrows_table_2_with_its_averages_and_marks():
    table = t.sparrow_sets(table_2_rows(), list(TABLE_2))
    assert [line.labels for line in table.lines] == [(name,) for name in TABLE_2]
    for line in table.lines:
        assert line.values == pytest.approx(TABLE_2[line.labels[0]], abs=0.0051)
    page = "\n".join(t.markdown(table))
    assert "| method | VideoDetailCaption tau | VideoDetailCaption ESR | VideoDetailCaption DSR | MVBench tau |" in page
    assert "| Sparrow | <u>3.88</u> | **1.96x** | **2.84x** |" in page and "| SpecVLM | **4.15** | 1.25x |" in page
    assert "bonus token included" in page and "identical to plain decoding in all 12 greedy requests" in page


def test_temperatures_are_sections_that_are_marked_apart():
    rows = table_2_rows()
    warm = [r | {"temperature": 1.0, "identical": False, "emitted": r["emitted"] - 100} for r in rows]
    table = t.sparrow_sets(rows + [r for r in warm if r["drafter"] != "SpecVLM"], list(TABLE_2))
    assert [(line.section, line.labels[0]) for line in table.lines] == [
        ("T = 0", "SpecVLM"), ("T = 0", "MSD"), ("T = 0", "Sparrow"), ("T = 1", "MSD"), ("T = 1", "Sparrow"),
    ]  # fmt: skip
    page = t.markdown(table)
    assert any(line.startswith("| T = 1 | Sparrow | **2.88** |") for line in page)
    # Sampled outputs differ from plain ones by rights.
    assert not any("Outputs differ" in line for line in page)


def test_a_missing_set_leaves_no_average():
    rows = [r for r in table_2_rows() if (r["drafter"], r["set"]) != ("MSD", "MVBench")]
    msd = t.sparrow_sets(rows, list(TABLE_2)).lines[1]
    assert msd.values[3:6] == (None,) * 3 == msd.values[-3:] and msd.values[0] == pytest.approx(2.69)
    assert "| MSD | 2.69 | <u>1.47x</u> | <u>1.76x</u> | - | - | - |" in "\n".join(
        t.markdown(t.sparrow_sets(rows, list(TABLE_2)))
    )
    with pytest.raises(AssertionError, match="no line for"):
        t.sparrow_sets(rows, ["MSD"])


def test_sparrows_breakdown():
    """Table 5, but for what it counts as generated: there the token of the prefill enters tau, too."""
    numbers = {"4.5k": (418.86, 136.23, 7.51, 1.20), "25k": (455.10, 168.69, 18.13, 11.46)}
    rows = []
    for budget, (tokens, calls, decode, prefill) in numbers.items():
        # A hundred such requests in one: 41886 tokens.
        visual = 4509 if budget == "4.5k" else 25_089
        row = request("MSD", calls=round(100 * calls), emitted=round(100 * tokens), decode=100 * decode,
                      prefill=100 * prefill, budget=budget, visual_tokens=visual)  # fmt: skip
        rows.append(row)
    table = t.breakdown([*rows[::-1], request("Sparrow")], "MSD")
    assert [group for group, _ in table.columns] == ["4.5k", "25k"], "by length, whatever order they were measured in"
    values = {line.labels[0]: line.values for line in table.lines}
    assert values["tau"] == pytest.approx((3.07, 2.69), abs=0.01)  # 455.10 / 168.69 is 2.698
    assert values["prefill share (%)"] == pytest.approx((13.8, 38.7), abs=0.05)
    assert values["one decoding step (ms)"] == pytest.approx((55.1, 107.5), abs=0.1)
    assert values["generated tokens"] == pytest.approx((41887, 45511))
    assert "**" not in "".join(t.markdown(table)[4:]), "measures of one method are not compared"


def test_an_ablation_has_a_column_for_each_part():
    parts = {"base": (False, False), "vata": (False, True)}
    rows = [
        request(d, set=name, budget=budget, visual_tokens=tokens, emitted=emitted)
        for d, extra in (("base", 0), ("vata", 91))
        for name, budget, tokens, emitted in (
            ("VideoDetailCaption", "25k", 25_089, 295 + extra),
            ("MME", "0.5k", 450, 340),
            ("VideoDetailCaption", "0.5k", 500, 395),
        )
    ]
    table = t.ablation(rows, parts, ("MTP", "VATA"))
    assert table.labels == ("method", "MTP", "VATA")
    assert [group for group, _ in table.columns] == ["VideoDetailCaption 0.5k", "VideoDetailCaption 25k", "MME 0.5k"]
    assert [(line.labels, line.values) for line in table.lines] == [
        (("base", "no", "no"), (3.95, 2.95, 3.40)), (("vata", "no", "yes"), (3.95, 3.86, 3.40)),
    ]  # fmt: skip


def test_by_length_goes_by_what_the_clips_had():
    rows = [request("MSD", budget=b, visual_tokens=n) for b, n in (("25k", 900), ("0.5k", 500), ("1.5k", 1500))]
    table = t.by_length(rows, ["MSD"])
    assert [group for group, _ in table.columns][::2] == ["0.5k", "25k", "1.5k"]
    assert "1 of 3 requests have fewer visual tokens than asked for" in "\n".join(t.markdown(table))


def test_sages_tables_count_no_bonus_token_and_say_so():
    rows = [
        request(drafter, name, calls=calls, emitted=300, plain=20.0, decode=decode)
        for drafter, calls, decode in (("SpecVLM", 75, 10.0), ("SAGE", 50, 8.0))
        for name in ("r0", "r1")
    ]
    table = t.sage_sets(rows, ["SpecVLM", "SAGE"])
    plain, specvlm, sage = table.lines
    assert plain.labels == (t.PLAIN,) and plain.values == (None, pytest.approx(300 / 20.0), None)
    assert specvlm.values == pytest.approx((3.0, 30.0, 2.0)) and sage.values == pytest.approx((5.0, 37.5, 2.5))
    page = "\n".join(t.markdown(table))
    assert "without the bonus token" in page and "VideoDetailCaption tau (no bonus)" in page
    assert f"| {t.PLAIN} | - | 15.00 | - |" in page, "plain decoding takes no part in the marks"
    # One less than elsewhere, where no cycle was cut.
    assert t.cell(rows[:2])["tau"] == pytest.approx(4.0) and t.cell(rows[:2])["num_accepted"] == pytest.approx(3.0)


def test_a_cut_cycle_counts_what_was_accepted():
    row = request("SAGE", calls=2, emitted=5) | {"accepted": [3, 4]}
    assert t.cell([row])["num_accepted"] == 3.5 and t.cell([row])["tau"] == 2.5


def test_lengths_of_answers_are_compared_on_the_same_requests():
    rows = [
        request("SAGE", name, max_new_tokens=length, emitted=length - 1, calls=length // 4, stop=stop)
        for length in (2048, 512, 1024)
        for name, stop in (("r0", "length"), ("r1", "eos" if length > 512 else "length"))
    ]
    table = t.by_generated(rows, ["SAGE"])
    assert [group for group, _ in table.columns][::3] == ["512", "1024", "2048"]
    assert table.lines[0].values[:2] == pytest.approx((511 / 128, 511 / 128 - 1)), "ours, and without the bonus token"
    assert any("Answers to 1 of 2 requests ended before: left out" in told for told in table.footnotes)


def test_speedups_are_of_a_token_where_sampled_answers_differ_in_length():
    """Plain decoding took 10 s for 100 tokens behind the prefill, drafting 10 s for 200 in the same request."""
    row = request("Sparrow", emitted=200, plain=10.0, decode=10.0, prefill=5.0) | {"plain_tokens": 101}
    found = t.cell([row])
    assert found["DSR"] == pytest.approx(2.0)
    assert found["ESR"] == pytest.approx((201 / 15.0) / (101 / 15.0)), "tokens a second end to end"
    # Over requests it is the ratio of sums, and equal answers need no tokens.
    assert t.cell([row, request("Sparrow", "r1", emitted=100, plain=30.0, decode=10.0)])["DSR"] == pytest.approx(
        (40.0 / 200) / (20.0 / 300)
    )


def test_pictures_have_tokens_per_second_end_to_end():
    rows = [request(d, set="MME", emitted=399, decode=5.0, prefill=5.0) for d in ("Sparrow - VATA", "Sparrow")]
    table = t.image_sets(rows, ["Sparrow - VATA", "Sparrow"])
    assert table.lines[0].values[:3] == pytest.approx((3.99, 40.0, 33.4 / 10.0))
    assert [line.labels[0] for line in table.lines] == ["Sparrow - VATA", "Sparrow"]


def test_findings_compare_lengths_of_clips_in_the_longest_answers():
    cells = [
        {"method": "Sparrow", "set": "clips", "temperature": 0.0, "budget": budget, "visual_tokens": tokens, "tau": tau,
         "tau_interval": (tau, tau), "max_new_tokens": new, "DSR": 1.5, "identical": 3, "requests": 3}
        for budget, tokens in (("0.5k", 500), ("25k", 25_089))
        for new, tau in ((512, 3.0), (2048, 4.0))
    ]  # fmt: skip
    told = [line for line in reading_report.findings(cells) if "visual tokens, " in line]
    expected = "tau 4.00 [4.00, 4.00] at 500 visual tokens, 4.00 [4.00, 4.00] at 25,089."
    assert told == [f"- Sparrow, clips, T = 0: {expected}"]


def generation(prefill=2.0, others=0.5):
    cycles = [Cycle(4, 25, 3, 4, 0.3, 0.4, 0.9, 0.1, 0.05)] * 10
    total = prefill + 0.2 + sum(c.draft_s + c.verify_s + c.update_s for c in cycles) + others
    return Generation(list(range(41)), cycles, prefill, 0.2, total, "length", 0.05)


def test_time_by_operation_adds_up():
    parts = time_parts(generation())
    assert parts == pytest.approx({
        "target_prefill": 2.0, "draft_prefill": 0.15, "token_pruning": 0.05, "verification": 4.0, "drafting": 3.0,
        "tree_update": 0.5, "others": 0.5,
    })  # fmt: skip
    row = measure_request("r0", "SAGE", [generation()], [generation()])
    (line,) = t.time_shares([row, row], ["SAGE"]).lines
    assert line.values == pytest.approx((19.61, 39.22, 1.47, 29.41, 0.49, 4.90, 4.90, 100.0), abs=0.01)
    assert sum(line.values[:-1]) == pytest.approx(100.0)


def test_what_differs_is_said_and_files_hold_everything(tmp_path):
    rows = [request("MSD"), request("MSD", "r1", identical=False)]
    table = t.by_length(rows, ["MSD"])
    assert "**Outputs differ** from plain decoding in 1 of 2 requests, first MSD in r1." in table.footnotes
    t.write(tmp_path, [table, t.breakdown(rows, "MSD")], about={"device": "CPU"})
    kept = json.loads((tmp_path / "video.json").read_text())
    assert [one["title"] for one in kept["tables"]] == ["By visual tokens", "Breakdown: MSD"]
    page = (tmp_path / "video.md").read_text()
    assert "## By visual tokens" in page and "- device: CPU" in page
