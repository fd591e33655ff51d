"""One summary and one bootstrap: equal to what the reports of each target computed before, and independent of ranks."""

import dataclasses
import random
import statistics

import numpy as np
import pytest
from draftsmith.eval import summary as s

from .rows import a_row, random_rows


def old_form(row, **more):
    """A row as the evaluations before this module kept it."""
    values = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
    lists = {name: list(values[name]) for name in ("tokens", "drafted", "nodes", "accepted")}
    return values | lists | {"emitted": row.num_emitted, "cycles": row.num_cycles} | more


def test_language_numbers_are_those_of_before():
    from draftsmith.eval import measure

    rows = random_rows(20)
    found, before = s.summarize(rows), measure.summarize([old_form(r) for r in rows], gamma=5)
    changed = {"tau_interval", "accepted_by_depth", "expected_speedup"}
    for name, value in before.items():
        if name not in changed:
            assert getattr(found, name) == pytest.approx(value), name
    assert [dataclasses.asdict(d) for d in found.accepted_by_depth] == before["accepted_by_depth"]
    assert found.levels == 5 and found.mean_levels < 5
    assert found.tau_interval == pytest.approx(before["tau_interval"], abs=0.15), "one of the two bootstraps went"


def test_video_numbers_are_those_of_before():
    from draftsmith.eval import reading_report, video_tables

    rows = random_rows(12, seed=1, visual_tokens=900)
    found, olds = s.summarize(rows), [old_form(r, set="clips") for r in rows]
    for name, value in video_tables.cell(olds).items():
        if name not in ("draft_ms", "emitted", "cycles"):  # a mean over requests, where T_q is their median
            assert getattr(found, name) == pytest.approx(value), name
    for name, value in video_tables.plain_cell(olds).items():
        assert getattr(found, f"plain_{name}") == pytest.approx(value)
    expected = reading_report._summary(olds, 5)["expected_speedup"]
    assert found.expected_speedup == pytest.approx(expected), "by the levels that were drafted"


def test_drawn_numbers_are_those_of_before():
    from draftsmith.eval import visual_report

    rows = [dataclasses.replace(r, plain_tokens=r.num_emitted + 1) for r in random_rows(12, seed=2)]
    found, before = s.summarize(rows), visual_report.summarize([old_form(r, rule="exact") for r in rows])
    assert pytest.approx(before.pop("SR")) == found.ESR and found.ESR_spread == pytest.approx(before.pop("SR_spread"))
    before = {name: value for name, value in before.items() if name not in ("rule", "tau_interval")}
    assert found.T_p_ms == pytest.approx(before.pop("plain_ms"))
    for name, value in before.items():
        assert getattr(found, name) == (tuple(value) if isinstance(value, list) else pytest.approx(value)), name


def test_the_interval_is_the_suites():
    from draftsmith.eval import suite_table

    rows = random_rows(30, seed=3)
    assert s.tau_interval(rows) == pytest.approx(suite_table.cell([old_form(r) for r in rows])["tau_interval"])


def test_rows_of_any_rank_in_any_order_give_the_same_numbers():
    rows = random_rows(15, seed=4)
    mixed = rows[:]
    random.Random(0).shuffle(mixed)
    assert s.summarize(mixed) == s.summarize(rows)
    renamed = [dataclasses.replace(r, method="another", drafter="x") for r in mixed]
    assert s.tau_interval(renamed) == s.tau_interval(rows), "nor does it depend on names"


def test_many_requests_are_resampled_in_parts(monkeypatch):
    rows = random_rows(40, seed=5)
    whole = s.tau_interval(rows)
    rng = np.random.default_rng(s.SEED)
    picks = np.concatenate([rng.integers(40, size=(n, 40)) for n in (7, 993)])
    assert np.array_equal(picks, np.random.default_rng(s.SEED).integers(40, size=(1000, 40)))
    assert whole[0] < s.tau_of(rows) < whole[1]


def test_a_request_without_a_cycle_counts():
    empty = a_row(accepted=(), request="e", total_s=0.1, plain_total_s=0.1)
    assert s.summarize([empty]).tau == 1.0 and s.summarize([empty]).levels == 0
    assert s.summarize([empty, a_row()]).requests == 2


def test_expected_speedups_by_hand():
    # tau 2, a chain of 5 with T_q/T_p = 1/4, and verification as dear as a step.
    row = a_row(accepted=(1, 1, 1), plain_cycle_s=0.02, draft_s=0.005, verify_s=0.04)
    found = s.summarize([row])
    assert found.expected_speedup == pytest.approx(2 / (5 / 4 + 2))
    assert found.expected_speedup_tabed == pytest.approx(2 / (5 / 4 + 1)), "TABED, equation 1"


def test_sampled_answers_of_other_lengths_are_compared_by_the_token():
    row = a_row(accepted=(99, 99), drafted=(99, 99), plain_total_s=15.0, plain_prefill_s=5.0, total_s=15.0,
                prefill_s=5.0, plain_tokens=101)  # fmt: skip
    assert s.speedups([row]) == pytest.approx((2.0, 201 / 101))


def test_paired_differences_pair_by_request_and_drafter():
    first = [a_row(request=f"r{n}", drafter=d, accepted=(a,) * 4) for n in range(6) for d, a in (("a", 2), ("b", 3))]
    second = [dataclasses.replace(row, method="T", accepted=(1,) * 4, emitted=(2,) * 4) for row in first]
    found = s.paired_difference(first, second[::-1])
    assert found.difference == pytest.approx(1.5) and found.requests == 12 and found.verdict == "above 0"
    one, other = ([r for r in first if r.drafter == d] for d in "ab")
    assert s.paired_difference(one, other) == s.Difference(-1.0, (-1.0, -1.0), "below 0", 6)
    assert s.paired_difference(one, [dataclasses.replace(other[0], request="new")]).requests == 0
    with pytest.raises(AssertionError, match="twice"):
        s.paired_difference(first, other)


def test_a_paired_interval_is_narrower_than_an_unpaired_one():
    easy = random.Random(0)
    first = [a_row(request=f"r{n}", accepted=(easy.randint(0, 4),) * 9) for n in range(30)]
    second = [dataclasses.replace(r, emitted=tuple(e + 1 for e in r.emitted)) for r in first]
    found = s.paired_difference(second, first)
    low, high = s.tau_interval(first)
    assert found.interval == pytest.approx((1.0, 1.0)) and high - low > 0.5


def test_seeds_have_students_interval():
    pairs = {n: ([a_row(accepted=(a,) * 10)], [a_row(accepted=(1,) * 10)]) for n, a in (("a", 1), ("b", 2), ("c", 3))}
    found = s.seed_difference(pairs)
    half = 4.303 * statistics.stdev([0, 1, 2]) / 3**0.5
    assert found.mean == 1.0 and found.interval == pytest.approx((1 - half, 1 + half))
    assert found.verdict == "includes 0" and found.deviation == pytest.approx(1.0)
    assert s.seed_difference({"a": pairs["a"]}) is None


def test_students_points():
    for degrees, value in ((1, 12.706), (9, 2.262), (10, 2.228), (20, 2.086), (29, 2.045), (1000, 1.962)):
        assert s.student_975(degrees) == pytest.approx(value, abs=0.001), "not the normal's 1.96 beyond ten seeds"
