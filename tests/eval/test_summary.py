"""One summary and one bootstrap: equal to what the reports of each target computed before, and independent of ranks."""

import dataclasses
import math
import random
import statistics

import numpy as np
import pytest
from draftsmith.eval import summary as s

from .rows import a_row, empty_row, random_rows

# What the three summaries before this one computed for these rows: language, video and image targets.
LANGUAGE = {
    "requests": 20, "tau": 2.412587413, "tau_mean_of_requests": 2.409543651, "num_accepted": 1.517482517,
    "acceptance_rate": 0.520383693, "T_q_ms": 6.106639675, "T_p_ms": 19.736260303, "T_verify_ms": 28.315100745,
    "T_q_over_T_p": 0.309412198, "expected_speedup_tabed": 0.947204415, "DSR": 1.251723869, "ESR": 1.210068311,
    "DSR_spread": (1.043532157, 1.748445304), "ESR_spread": (0.993200729, 1.657651001), "prefill_share": 0.11263657,
    "identical": 18, "first_different": "r11", "rejected_somewhere": True, "beyond_positions": 0,
}  # fmt: skip
DEPTHS = [
    (1, 143, 0.734265734, 0.734265734), (2, 110, 0.581818182, 0.703296703), (3, 81, 0.395061728, 0.62745098),
    (4, 55, 0.2, 0.44), (5, 28, 0.178571429, 0.625),
]  # fmt: skip
VIDEO = {
    "tau": 2.32, "tau_interval": (2.114583333, 2.541666667), "requests": 12, "identical": 11, "beyond_positions": 0,
    "DSR": 1.453693871, "ESR": 1.390654733, "num_accepted": 1.413333333, "tokens_per_s": 16.896268416,
    "decoded_per_s": 18.239367778, "generated": 15.5, "calls": 6.25, "total_s": 0.91736232, "decode_s": 0.794983696,
    "prefill_s": 0.122378625, "prefill_share": 0.133402716, "step_s": 0.127197391, "visual_tokens": 900.0,
    "plain_tokens_per_s": 12.149865825, "plain_decoded_per_s": 12.546911105, "plain_total_s": 1.275734253,
    "plain_prefill_s": 0.120071327, "expected_speedup": 1.628172987,
}  # fmt: skip
DRAWN = {
    "requests": 12, "ESR": 1.19376171, "ESR_spread": (0.786857541, 1.520353481), "tau": 2.450549451,
    "tau_mean_of_requests": 2.401575277, "kept_depth": 2.868131868, "mean_nodes": 7.208791209,
    "accepted_histogram": (24, 29, 14, 14, 6, 4), "first_accepted": 0.736263736, "target_ms": 32.039778723,
    "drafter_ms": 32.239543938, "rule_ms": 1.4026305, "cycle_ms": 60.823797608, "identical": 10,
    "first_different": "r0", "T_p_ms": 25.268553021,
}  # fmt: skip


@pytest.mark.parametrize(("rows", "before"), [
    (random_rows(20), LANGUAGE),
    (random_rows(12, seed=1, visual_tokens=900), VIDEO),
    ([dataclasses.replace(r, plain_tokens=r.num_emitted + 1) for r in random_rows(12, seed=2)], DRAWN),
])  # fmt: skip
def test_numbers_are_those_of_each_targets_own_summary_before(rows, before):
    result = s.summarize(rows)
    for name, value in before.items():
        assert getattr(result, name) == (value if isinstance(value, str) else pytest.approx(value, rel=1e-6)), name


def test_shares_by_depth():
    result = s.summarize(random_rows(20))
    assert [dataclasses.astuple(depth) for depth in result.accepted_by_depth] == [pytest.approx(d) for d in DEPTHS]
    assert result.levels == 5 and result.kept_depth < 5


def test_a_depth_that_no_cycle_reached_has_no_share():
    """All first drafts are rejected: the second depth was drafted and never tried."""
    nothing = lambda r: {"accepted": (0,) * len(r.accepted), "emitted": (1,) * len(r.emitted)}  # noqa: E731
    rows = [dataclasses.replace(r, **nothing(r)) for r in random_rows(4)]
    first, second, *_ = s.summarize(rows).accepted_by_depth
    assert (first.share, first.share_of_reached, second.share) == (0.0, 0.0, 0.0) and second.drafted > 0
    assert second.share_of_reached is None


def test_planned_and_kept_depth():
    """ADT-Tree's d leaves out neither what reranking dropped nor counts a cycle that drafted nothing."""
    rows = [a_row(accepted=(2, 0, 0), planned=(5, 5, 0), drafted=(4, 3, 0))]
    result = s.summarize(rows)
    assert (result.planned_depth, result.kept_depth) == (5.0, 7 / 3)
    assert result.tau_over_depth == pytest.approx(result.tau / 5)


def test_the_one_bootstrap_is_the_suites():
    """The other one, of benchmarks, gave the same requests another interval."""
    assert s.summarize(random_rows(30, seed=3)).tau_interval == pytest.approx((2.1808510638297873, 2.5933014354066986))


def test_rows_of_any_rank_in_any_order_give_the_same_numbers():
    rows = random_rows(15, seed=4)
    mixed = rows[:]
    random.Random(0).shuffle(mixed)
    assert s.summarize(mixed) == s.summarize(rows)
    renamed = [dataclasses.replace(r, method="another", drafter="x") for r in mixed]
    assert s.summarize(renamed).tau_interval == s.summarize(rows).tau_interval, "nor does it depend on names"


def test_many_requests_are_resampled_in_parts(monkeypatch):
    rows = random_rows(40, seed=5)
    whole = s.summarize(rows).tau_interval
    rng = np.random.default_rng(s.SEED)
    picks = np.concatenate([rng.integers(40, size=(n, 40)) for n in (7, 993)])
    assert np.array_equal(picks, np.random.default_rng(s.SEED).integers(40, size=(1000, 40)))
    assert whole[0] < s.tau_of(rows) < whole[1]


def test_a_request_without_a_cycle_counts_and_pulls_no_number_down():
    """It has no times of a cycle and no speedup of its own: zeros in their place would halve medians and quartiles."""
    empty = [empty_row(request=f"e{n}") for n in range(2)]
    one, both = s.summarize([a_row()]), s.summarize([a_row(), *empty])
    assert (both.requests, both.levels) == (3, one.levels)
    for name in ("tau", "T_p_ms", "T_q_ms", "T_verify_ms", "rule_ms", "drafter_ms", "cycle_ms", "expected_speedup",
                 "DSR", "DSR_spread", "T_q_over_T_p"):  # fmt: skip
        assert getattr(both, name) == pytest.approx(getattr(one, name)), name


def test_equal_drafters_narrow_no_interval():
    """Four drafters that decode the same requests alike are no more requests than one."""
    rows = random_rows(12, seed=6, method="M")
    other = [dataclasses.replace(row, method="T", mode="T") for row in random_rows(12, seed=7)]
    four, blind = ([dataclasses.replace(r, drafter=d) for r in some for d in "abcd"] for some in (rows, other))
    one, many = s.summarize(rows), s.summarize(four)
    assert (many.requests, many.answers) == (12, 48) and many.tau_interval == one.tau_interval and many.tau == one.tau
    difference = s.paired_difference(four, blind)
    assert difference == s.paired_difference(rows, other) and difference.requests == 12


def test_ratios_over_nothing_are_no_numbers():
    empty = s.summarize([empty_row()])
    assert not empty.is_measured and (empty.requests, empty.calls, empty.generated, empty.ESR) == (1, 0, 1, 1.0)
    ratios = ("tau", "tau_mean_of_requests", "num_accepted", "acceptance_rate", "first_accepted", "planned_depth",
              "kept_depth", "tau_over_depth", "mean_nodes", "T_q_ms", "T_p_ms", "T_q_over_T_p", "expected_speedup",
              "expected_speedup_tabed", "DSR", "cycle_ms", "step_s", "decoded_per_s")  # fmt: skip
    assert [name for name in ratios if not math.isnan(getattr(empty, name))] == []
    assert all(math.isnan(end) for end in (*empty.tau_interval, *empty.DSR_spread))
    drafted_nothing = s.summarize([a_row(accepted=(0, 0), drafted=(0, 0), draft_s=0.0)])
    assert drafted_nothing.tau == 1.0 and math.isnan(drafted_nothing.acceptance_rate), "nothing to accept"
    assert drafted_nothing.expected_speedup == 1.0 and drafted_nothing.expected_speedup_tabed == 1.0
    difference = s.paired_difference([a_row()], [a_row(request="other")])
    assert difference.verdict == "not measured" and math.isnan(difference.difference)


def test_tau_pools_the_requests_cycles():
    """Not the mean of the requests' own taus, which would be 1.5; the interval's ends are the requests' own."""
    rows = [a_row(request="a", accepted=(1,) * 100), a_row(request="b", accepted=(0,) * 300)]
    result = s.summarize(rows)
    assert result.requests == 2 and result.tau == pytest.approx((200 + 300) / 400)
    assert result.tau_interval == pytest.approx((1.0, 2.0)) and s.summarize(rows[::-1]) == result


def test_expected_speedups_by_hand():
    # tau 2, a chain of 5 with T_q/T_p = 1/4, and verification as dear as a step.
    row = a_row(accepted=(1, 1, 1), plain_cycle_s=0.02, draft_s=0.005, verify_s=0.04)
    result = s.summarize([row])
    assert result.expected_speedup == pytest.approx(2 / (5 / 4 + 2))
    assert result.expected_speedup_tabed == pytest.approx(2 / (5 / 4 + 1)), "TABED, equation 1"


def test_equation_1_takes_gamma_and_not_what_short_answers_left_of_it():
    """By hand: a chain of 5 whose answers have room for two drafts. With these two the value would be 1.43."""
    row = a_row(accepted=(1, 1), planned=(5, 5), drafted=(2, 2), plain_cycle_s=0.02, draft_s=0.004, verify_s=0.02)
    result = s.summarize([row, dataclasses.replace(row, request="r1", planned=(5, 0), drafted=(2, 0))])
    assert (result.levels, result.planned_depth, result.kept_depth) == (5, 5.0, 1.5)
    assert result.expected_speedup_tabed == pytest.approx(2 / (5 * 0.2 + 1)) == pytest.approx(1.0)
    assert result.expected_speedup == pytest.approx(2 / (1.5 * 0.2 + 1)), "what was kept, not what was planned"


def test_a_tree_that_adapts_has_the_mean_of_its_plans_for_gamma():
    row = a_row(accepted=(1, 1), planned=(6, 2), drafted=(3, 2), plain_cycle_s=0.02, draft_s=0.005, verify_s=0.02)
    result = s.summarize([row])
    assert result.levels == 6 and result.expected_speedup_tabed == pytest.approx(2 / (4 * 0.25 + 1))


def test_sampled_answers_of_other_lengths_are_compared_by_the_token():
    row = a_row(accepted=(99, 99), drafted=(99, 99), plain_total_s=15.0, plain_prefill_s=5.0, total_s=15.0,
                prefill_s=5.0, plain_tokens=101)  # fmt: skip
    decoding, end_to_end = (getattr(s.summarize([row]), name) for name in ("DSR", "ESR"))
    assert (decoding, end_to_end) == pytest.approx((2.0, 201 / 101))


def test_paired_differences_pair_by_request_and_drafter():
    first = [a_row(request=f"r{n}", drafter=d, accepted=(a,) * 4) for n in range(6) for d, a in (("a", 2), ("b", 3))]
    second = [dataclasses.replace(row, method="T", accepted=(1,) * 4, emitted=(2,) * 4) for row in first]
    result = s.paired_difference(first, second[::-1])
    assert result.difference == pytest.approx(1.5) and result.requests == 6 and result.verdict == "above 0"
    one, other = ([r for r in first if r.drafter == d] for d in "ab")
    assert s.paired_difference(one, other) == s.Difference(-1.0, (-1.0, -1.0), "below 0", 6)
    assert s.paired_difference(one, [dataclasses.replace(other[0], request="new")]).requests == 0
    with pytest.raises(AssertionError, match="twice"):
        s.paired_difference(first, other)


def test_drafters_of_other_names_pair_in_their_order():
    """Two kinds of drafts of three seeds each, as a recipe names their stages."""
    taus = {"dflash": 1, "dflash_1": 2, "dflash_2": 3, "eagle3": 1, "eagle3_1": 1, "eagle3_2": 1}
    rows = [a_row(request=f"r{n}", drafter=d, accepted=(a,) * 4) for n in range(4) for d, a in taus.items()]
    first, second = ([r for r in rows if r.drafter.startswith(kind)] for kind in ("dflash", "eagle3"))
    result = s.paired_difference(first, second[::-1])
    assert result.difference == pytest.approx(1.0) and result.requests == 4
    assert s.paired_difference(first[::-1], second) == result


def test_a_paired_interval_is_narrower_than_an_unpaired_one():
    easy = random.Random(0)
    first = [a_row(request=f"r{n}", accepted=(easy.randint(0, 4),) * 9) for n in range(30)]
    second = [dataclasses.replace(r, emitted=tuple(e + 1 for e in r.emitted)) for r in first]
    result = s.paired_difference(second, first)
    low, high = s.summarize(first).tau_interval
    assert result.interval == pytest.approx((1.0, 1.0)) and high - low > 0.5


def test_seeds_have_students_interval():
    pairs = {n: ([a_row(accepted=(a,) * 10)], [a_row(accepted=(1,) * 10)]) for n, a in (("a", 1), ("b", 2), ("c", 3))}
    result = s.seed_difference(pairs)
    half = 4.303 * statistics.stdev([0, 1, 2]) / 3**0.5
    assert result.mean == 1.0 and result.interval == pytest.approx((1 - half, 1 + half))
    assert result.verdict == "includes 0"
    assert s.seed_difference({"a": pairs["a"]}) is None


def test_students_points():
    for degrees, value in ((1, 12.706), (9, 2.262), (10, 2.228), (20, 2.086), (29, 2.045), (1000, 1.962)):
        assert s.student_975(degrees) == pytest.approx(value, abs=0.001), "not the normal's 1.96"
