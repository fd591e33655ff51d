"""Tables of long visual inputs against numbers that the articles print, and what they say of what does not hold."""

import dataclasses

import pytest
from draftsmith.eval.cells import MethodInfo
from draftsmith.eval.measured_rows import PLAIN
from draftsmith.eval.studies import video
from draftsmith.eval.summary import summarize
from draftsmith.eval.tables import markdown

from ..rows import a_row


def request(method, name="r0", *, calls=100, emitted=388, plain=28.4, decode=10.0, prefill=11.46, **more):
    """A request of `calls` verification passes; plain decoding takes `plain` seconds, all but the prefill's."""
    accepted = [emitted // calls - 1] * calls
    accepted[0] += emitted - calls - sum(accepted)
    values = {
        "request": name, "method": method, "benchmark": "VideoDetailCaption", "budget": "25k", "medium": "video",
        "visual_tokens": 25_089, "max_new_tokens": 512, "plain_total_s": plain + prefill, "plain_prefill_s": prefill,
        "total_s": decode + prefill, "prefill_s": prefill, "accepted": accepted,
        "drafted": tuple(a + 1 for a in accepted),
    }  # fmt: skip
    return a_row(**(values | more))


def table_of(title, rows, *names, **infos):
    """The table of this title among those of some rows, of methods named or described."""
    methods = infos or {name: MethodInfo() for name in names}
    return next(table for table in video.tables(rows, methods) if table.title == title)


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
    for method, values in TABLE_2.items():
        for place, name in enumerate(SETS):
            tau, esr, dsr = values[3 * place : 3 * place + 3]
            prefill = (dsr - esr) / (esr - 1)  # (dsr + prefill) / (1 + prefill) = esr
            rows.append(
                request(method, emitted=round(100 * tau), plain=dsr, decode=1.0, prefill=prefill, benchmark=name)
            )
    return rows


def test_sparrows_table_2_with_its_averages_and_marks():
    table = table_of("Sets of videos", table_2_rows(), *TABLE_2)
    assert table.column("method") == list(TABLE_2) and table.source == "Sparrow, tables 2 and 3"
    for row in table.rows:
        assert row[1:] == pytest.approx(TABLE_2[row[0]], abs=0.0051)
    page = "\n".join(markdown(table))
    assert "| method | VideoDetailCaption tau | VideoDetailCaption ESR | VideoDetailCaption DSR | MVBench tau |" in page
    assert "| Sparrow | <u>3.88</u> | **1.96x** | **2.84x** |" in page and "| SpecVLM | **4.15** | 1.25x |" in page
    assert "bonus token included" in page and "identical to plain decoding in all 12 greedy requests" in page


def test_table_3_has_each_set_at_its_own_length():
    """17k, 13k and 15k: every set stands in the table at its own, and the note says which has which."""
    budgets = {"VideoDetailCaption": ("17k", 17_000), "MVBench": ("13k", 13_000), "LongVideoBench": ("15k", 15_000)}
    rows = [request(m, benchmark=name, budget=budget, visual_tokens=tokens, emitted=389)
            for m in ("MSD", "Sparrow") for name, (budget, tokens) in budgets.items()]  # fmt: skip
    built = video.tables(rows, {"MSD": MethodInfo(), "Sparrow": MethodInfo()})
    assert [table.title for table in built] == ["Sets of videos", "Time by operation"]
    assert built[0].column("MVBench tau") == pytest.approx([3.89, 3.89]) and built[0].column("Avg. tau")[0] is not None
    assert "Clips at 17k (VideoDetailCaption), 13k (MVBench), 15k (LongVideoBench) visual tokens." in built[0].note
    more = [dataclasses.replace(row, budget="0.5k", visual_tokens=500) for row in rows if row.benchmark == "MVBench"]
    titles = {table.title: table for table in video.tables(rows + more, {"MSD": MethodInfo(), "Sparrow": MethodInfo()})}
    assert titles["Sets of videos"].note == built[0].note, "each set at its most visual tokens"
    assert [column.group for column in titles["By visual tokens"].columns[1::2]] == ["0.5k", "13k"]


def test_sparrows_breakdown():
    """Table 5, but for what it counts as generated: there the token of the prefill enters tau, too."""
    numbers = {"4.5k": (418.86, 136.23, 7.51, 1.20), "25k": (455.10, 168.69, 18.13, 11.46)}
    rows = []
    for budget, (tokens, calls, decode, prefill) in numbers.items():
        # Ten such requests in one: 4189 tokens.
        visual = 4509 if budget == "4.5k" else 25_089
        rows.append(request("MSD", calls=round(10 * calls), emitted=round(10 * tokens), decode=10 * decode,
                            prefill=10 * prefill, budget=budget, visual_tokens=visual))  # fmt: skip
    table = table_of("Breakdown: MSD", [*rows[::-1], request("Sparrow")], "MSD", "Sparrow")
    assert [column.name for column in table.columns] == ["per request", "4.5k", "25k"], "by length, whatever came first"
    values = {row[0]: row[1:] for row in table.rows}
    assert values["tau"] == pytest.approx((3.07, 2.69), abs=0.01)  # 455.10 / 168.69 is 2.698
    assert values["prefill share (%)"] == pytest.approx((13.8, 38.7), abs=0.05)
    assert values["one decoding step (ms)"] == pytest.approx((55.1, 107.5), abs=0.1)
    assert values["generated tokens"] == pytest.approx((4190, 4552))
    assert "**" not in "".join(markdown(table)[4:]), "measures of one method are not compared"


def test_the_ablation_has_a_column_for_each_part():
    parts = {"base": {"MTP": False, "VATA": False}, "vata": {"MTP": False, "VATA": True}}
    rows = [
        request(method, benchmark=name, budget=budget, visual_tokens=tokens, emitted=emitted)
        for method, extra in (("base", 0), ("vata", 91))
        for name, budget, tokens, emitted in (
            ("VideoDetailCaption", "25k", 25_089, 295 + extra),
            ("MME", "0.5k", 450, 340),
            ("VideoDetailCaption", "0.5k", 500, 395),
        )
    ]
    table = table_of("Ablation", rows, **{name: MethodInfo(parts=of) for name, of in parts.items()})
    assert [c.heading for c in table.columns] == [
        "method", "MTP", "VATA", "VideoDetailCaption 0.5k tau", "VideoDetailCaption 25k tau", "MME 0.5k tau",
    ]  # fmt: skip
    assert table.rows == (("base", "no", "no", 3.95, 2.95, 3.40), ("vata", "no", "yes", 3.95, 3.86, 3.40))


def test_by_length_goes_by_what_the_clips_had():
    rows = [request("MSD", budget=b, visual_tokens=n) for b, n in (("25k", 900), ("0.5k", 500), ("1.5k", 1500))]
    table = table_of("By visual tokens", rows, "MSD")
    assert [column.group for column in table.columns[1::2]] == ["0.5k", "25k", "1.5k"]
    assert "1 of 3 requests have fewer visual tokens than asked for" in "\n".join(markdown(table))


def test_sages_tables_count_no_bonus_token_and_say_so():
    rows = [
        request(method, name, calls=calls, emitted=300, plain=20.0, decode=decode)
        for method, calls, decode in (("SpecVLM", 75, 10.0), ("SAGE", 50, 8.0))
        for name in ("r0", "r1")
    ]
    table = table_of("Sets, as SAGE counts", rows, SpecVLM=MethodInfo(), SAGE=MethodInfo(adaptive=True))
    assert table.rows[0] == (PLAIN, None, pytest.approx(300 / 20.0), None)
    assert table.rows[1][1:] == pytest.approx((3.0, 30.0, 2.0))
    assert table.rows[2][1:] == pytest.approx((5.0, 37.5, 2.5))
    page = "\n".join(markdown(table))
    assert "without the bonus token" in page and "VideoDetailCaption tau (no bonus)" in page
    assert f"| {PLAIN} | - | 15.00 | - |" in page, "plain decoding takes no part in the marks"
    # One less than elsewhere, where no cycle was cut.
    assert summarize(rows[:2]).tau == pytest.approx(4.0) and summarize(rows[:2]).num_accepted == pytest.approx(3.0)


def test_lengths_of_answers_are_compared_on_the_same_requests():
    rows = [
        request("SAGE", name, max_new_tokens=length, emitted=length - 1, calls=length // 4, stop=stop)
        for length in (2048, 512, 1024)
        for name, stop in (("r0", "length"), ("r1", "eos" if length > 512 else "length"))
    ]
    table = table_of("By generated tokens", rows, "SAGE")
    assert [column.group for column in table.columns[1::3]] == ["512", "1024", "2048"]
    assert table.rows[0][1:3] == pytest.approx((511 / 128, 511 / 128 - 1)), "ours, and without the bonus token"
    assert any("Answers to 1 of 2 requests ended earlier and are left out" in told for told in table.footnotes)


def test_pictures_have_tokens_per_second_end_to_end():
    names = ("Sparrow - VATA", "Sparrow")
    rows = [request(m, benchmark="MME", medium="image", emitted=399, decode=5.0, prefill=5.0) for m in names]
    table = table_of("Sets of pictures", [*rows, request("Sparrow")], *names)
    assert table.rows[0][0] == "Sparrow - VATA" and table.rows[0][1:4] == pytest.approx((3.99, 40.0, 33.4 / 10.0))


def test_time_by_operation_adds_up():
    parts = {"target_prefill": 2.0, "draft_prefill": 0.15, "token_pruning": 0.03, "captioning": 0.02,
             "verification": 4.0, "drafting": 3.0, "tree_update": 0.5, "others": 0.3}  # fmt: skip
    rows = [request("SAGE", name, parts_s=parts) for name in ("r0", "r1")]
    table = table_of("Time by operation", rows, "MSD", "SAGE")
    (row,) = table.rows
    assert row[1:] == pytest.approx((0.2, 0.4, 0.015, 0.3, 0.003, 0.002, 0.05, 0.03, 1.0))
    assert "| SAGE | 20.00% |" in "\n".join(markdown(table))
