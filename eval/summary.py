"""Numbers of one method on one set of requests, and differences between two: all from rows, with one bootstrap.

tau (block efficiency) is tokens emitted after the prefill over verification passes, over the whole set, cut cycles
included, with the bonus token; plain decoding has 1 (TABED, section 2; docs/words.md). Intervals do not depend on the
number of ranks or on the order in which rows were measured: requests are sorted by name and resampled from one seed.

A ratio over nothing (no cycle, nothing drafted) is NaN: tables show a dash, JSON has null. An answer that ends with its
first token has no cycle.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .intervals import (
    Interval,
    Verdict,
    bootstrap,
    ends,
    mean,
    median,
    quartiles,
    ratio,
    resampled,
    student_half_width,
    verdict,
)
from .rows import Row


@dataclass(frozen=True)
class Depth:
    """What was drafted at one depth of the trees."""

    depth: int  # from 1
    drafted: int  # cycles whose tree had this level
    share: float  # of these, where a token of it was accepted
    share_of_reached: float  # of those where all before it were accepted, too; 0 where none was


@dataclass(frozen=True)
class Summary:
    """One method on one set of requests.

    Times in ms are medians over requests of each request's median; times in s are means over requests. Speedups are
    against plain decoding of the same target in the same run, of a token: sampled answers differ in length.
    """

    requests: int
    tau: float
    tau_interval: Interval  # 95%, over resampled requests
    tau_mean_of_requests: float
    num_accepted: float  # in a cycle, without the bonus token (SAGE's tau)
    acceptance_rate: float  # of the drafted levels
    first_accepted: float  # share of cycles that accepted a draft
    accepted_by_depth: tuple[Depth, ...]
    accepted_histogram: tuple[int, ...]  # cycles that accepted 0, 1, ...
    levels: int  # that the deepest tree was to have; gamma of a chain
    planned_depth: float  # levels that a tree was to have, of the cycles that drafted (ADT-Tree's mean depth d)
    kept_depth: float  # levels that it had when it was verified, of all cycles
    tau_over_depth: float  # tau / planned_depth: ADT-Tree's acceptance rate alpha as section III-B defines it
    mean_nodes: float

    T_q_ms: float  # drafting, for each level
    T_p_ms: float  # a step of plain decoding
    T_verify_ms: float  # a verification pass with its rule
    T_q_over_T_p: float
    expected_speedup: float  # tau / (kept_depth T_q/T_p + T_verify/T_p)
    expected_speedup_tabed: float  # tau / (planned_depth T_q/T_p + 1): TABED, equation 1
    DSR: float  # speedup of decoding alone
    ESR: float  # speedup end to end
    DSR_spread: Interval  # quartiles over requests
    ESR_spread: Interval
    drafter_ms: float  # of a cycle
    target_ms: float  # of a cycle, without the rule
    rule_ms: float
    cycle_ms: float

    prefill_share: float  # of the time end to end
    total_s: float
    decode_s: float
    prefill_s: float
    step_s: float  # a cycle, everything included
    plain_total_s: float
    plain_prefill_s: float
    tokens_per_s: float  # end to end
    decoded_per_s: float  # without the prefill
    plain_tokens_per_s: float
    plain_decoded_per_s: float
    generated: float  # tokens of a request, the prefill's included
    calls: float  # verification passes of a request
    visual_tokens: float
    time_shares: Mapping[str, float] = field(default_factory=dict)  # of each operation (rows.time_parts)

    identical: int = 0  # requests whose tokens are plain decoding's
    first_different: str | None = None
    ties: int = 0  # requests that differ where the target's two scores nearly tie (first_difference.py)
    differences: tuple[Mapping[str, Any], ...] = ()  # of the others and of these, the widest gap first
    rejected_somewhere: bool = False
    beyond_positions: int = 0  # requests that go beyond the draft's positions

    @property
    def is_measured(self) -> bool:
        """Whether a cycle was run: without one there is neither tau nor a speedup of decoding."""
        return self.calls > 0

    def to_json(self) -> dict[str, Any]:
        """Field name -> value of every field; what explains differences only where there are some."""
        values = asdict(self)
        return values if self.differences else {k: v for k, v in values.items() if k not in ("ties", "differences")}


def summarize(rows: Iterable[Row]) -> Summary:
    """The numbers of some rows, which may come from any number of ranks, in any order."""
    rows = ordered(rows)
    assert rows, "no request to summarize"
    return Summary(
        requests=len(rows),
        **_acceptance(rows),
        **_speed(rows),
        **_totals(rows),
        visual_tokens=mean([r.visual_tokens for r in rows]),
        time_shares=_time_shares(rows),
        identical=sum(r.identical for r in rows),
        first_different=next((r.request for r in rows if not r.identical), None),
        **_differences(rows),
        beyond_positions=sum(bool(r.details.get("beyond_positions", False)) for r in rows),
    )


def _differences(rows: Sequence[Row]) -> dict[str, Any]:
    """The fields of `Summary` that explain answers that are not plain decoding's, as far as rows say."""
    known = [{"request": r.request, **r.details["difference"]} for r in rows if "difference" in r.details]
    known.sort(key=lambda d: (d["tie"], -math.inf if d["ulps"] is None else -d["ulps"]))
    return {"ties": sum(d["tie"] for d in known), "differences": tuple(known)}


def _acceptance(rows: Sequence[Row]) -> dict[str, Any]:
    """The fields of `Summary` that count tokens."""
    cycles, emitted = sum(r.num_cycles for r in rows), sum(r.num_emitted for r in rows)
    drafted, accepted = sum(sum(r.drafted) for r in rows), sum(sum(r.accepted) for r in rows)
    num_accepted = [a for r in rows for a in r.accepted]
    tau, planned_depth = ratio(emitted, cycles), _planned_depth(rows)
    return {
        "tau": tau,
        "tau_interval": tau_interval(rows),
        "tau_mean_of_requests": mean([r.num_emitted / r.num_cycles for r in rows if r.num_cycles]),
        "num_accepted": ratio(accepted, cycles),
        "acceptance_rate": ratio(accepted, drafted),
        "first_accepted": ratio(sum(a > 0 for a in num_accepted), cycles),
        "accepted_by_depth": by_depth(rows),
        "accepted_histogram": tuple(num_accepted.count(n) for n in range(max(num_accepted, default=0) + 1)),
        "levels": max((d for r in rows for d in r.planned), default=0),
        "planned_depth": planned_depth,
        "kept_depth": ratio(drafted, cycles),
        "tau_over_depth": ratio(tau, planned_depth),
        "mean_nodes": ratio(sum(sum(r.nodes) for r in rows), cycles),
        "rejected_somewhere": accepted < drafted,
    }


def _speed(rows: Sequence[Row]) -> dict[str, Any]:
    """The fields of `Summary` that say what a cycle costs, and the speedups that are expected of it and measured."""
    cycles, drafts = sum(r.num_cycles for r in rows), any(any(r.drafted) for r in rows)
    tau = tau_of(rows)
    kept_depth = ratio(sum(sum(r.drafted) for r in rows), cycles)
    # A request without a cycle has no times of one: its zeros would pull every median down.
    with_cycles = [r for r in rows if r.num_cycles]
    t_p = median(r.plain_cycle_s for r in rows if r.plain_tokens > 1)
    t_q = median(r.draft_s for r in rows if any(r.drafted))
    t_verify, rule = median(r.verify_s for r in with_cycles), median(r.rule_s for r in with_cycles)
    decoding, end_to_end = speedups(rows)
    each, relative = [speedups([row]) for row in rows], ratio(t_q, t_p)
    drafting, planned = (depth * relative if drafts else 0.0 for depth in (kept_depth, _planned_depth(rows)))
    return {
        "T_q_ms": 1e3 * t_q,
        "T_p_ms": 1e3 * t_p,
        "T_verify_ms": 1e3 * t_verify,
        "T_q_over_T_p": relative,
        "expected_speedup": tau / (drafting + ratio(t_verify, t_p)),
        "expected_speedup_tabed": tau / (planned + 1),
        "DSR": decoding,
        "ESR": end_to_end,
        "DSR_spread": quartiles([one[0] for one in each]),
        "ESR_spread": quartiles([one[1] for one in each]),
        "drafter_ms": 1e3 * median(r.draft_cycle_s for r in with_cycles),
        "target_ms": 1e3 * (t_verify - rule),
        "rule_ms": 1e3 * rule,
        "cycle_ms": 1e3 * median(r.cycle_s for r in with_cycles),
    }


def _planned_depth(rows: Sequence[Row]) -> float:
    """Mean of the cycles that drafted: gamma of a chain, whatever ended its answers and on whatever device."""
    return mean([levels for r in rows for levels in r.planned if levels])


def _totals(rows: Sequence[Row]) -> dict[str, Any]:
    """The fields of `Summary` that are seconds and tokens of whole requests."""
    count, cycles, emitted = len(rows), sum(r.num_cycles for r in rows), sum(r.num_emitted for r in rows)
    total, prefill = sum(r.total_s for r in rows), sum(r.prefill_s for r in rows)
    plain_total, plain_prefill = sum(r.plain_total_s for r in rows), sum(r.plain_prefill_s for r in rows)
    plain_tokens = sum(r.plain_tokens for r in rows)
    return {
        "prefill_share": ratio(prefill, total),
        "total_s": total / count,
        "decode_s": (total - prefill) / count,
        "prefill_s": prefill / count,
        "step_s": ratio(total - prefill, cycles),
        "plain_total_s": plain_total / count,
        "plain_prefill_s": plain_prefill / count,
        # The first token comes from the prefill: it is generated, and in no cycle.
        "tokens_per_s": ratio(emitted + count, total),
        "decoded_per_s": ratio(emitted, total - prefill),
        "plain_tokens_per_s": ratio(plain_tokens, plain_total),
        "plain_decoded_per_s": ratio(plain_tokens - count, plain_total - plain_prefill),
        "generated": (emitted + count) / count,
        "calls": cycles / count,
    }


def ordered(rows: Iterable[Row]) -> list[Row]:
    """By request first, so that the bootstrap resamples the same requests for every method."""
    return sorted(rows, key=lambda row: (row.request, *map(str, row.key)))


def speedups(rows: Sequence[Row]) -> tuple[float, float]:
    """DSR and ESR: seconds a token of plain decoding over those of drafting, without the prefill and with it."""
    total, prefill = sum(r.total_s for r in rows), sum(r.prefill_s for r in rows)
    plain_total, plain_prefill = sum(r.plain_total_s for r in rows), sum(r.plain_prefill_s for r in rows)
    # Of equal answers the tokens cancel. The first one comes from the prefill.
    decoded, plain_tokens = sum(r.num_emitted for r in rows), sum(r.plain_tokens for r in rows)
    tokens, plain_decoded = decoded + len(rows), plain_tokens - len(rows)
    return (
        ratio((plain_total - plain_prefill) * decoded, (total - prefill) * plain_decoded),
        ratio(plain_total * tokens, total * plain_tokens),
    )


def by_depth(rows: Iterable[Row]) -> tuple[Depth, ...]:
    """Per depth: how often it was drafted, and the share accepted of those drafted and of those reached."""
    pairs = [pair for r in rows for pair in zip(r.drafted, r.accepted, strict=True)]
    depths = []
    for depth in range(1, 1 + max((d for d, _ in pairs), default=0)):
        drafted = sum(d >= depth for d, _ in pairs)
        reached = sum(d >= depth and a >= depth - 1 for d, a in pairs)
        accepted = sum(a >= depth for _, a in pairs)
        depths.append(Depth(depth, drafted, ratio(accepted, drafted), accepted / reached if reached else 0.0))
    return tuple(depths)


def tau_of(rows: Iterable[Row]) -> float:
    """Tokens of all cycles over cycles; NaN without a cycle."""
    rows = list(rows)
    return ratio(sum(r.num_emitted for r in rows), sum(r.num_cycles for r in rows))


def tau_interval(rows: Iterable[Row]) -> Interval:
    """95% interval of tau over resampled requests."""
    rows = ordered(rows)
    return bootstrap([r.num_emitted for r in rows], [r.num_cycles for r in rows])


@dataclass(frozen=True)
class Difference:
    """tau of one method less that of another, on the same requests."""

    difference: float
    interval: Interval  # 95%, paired bootstrap
    verdict: Verdict
    requests: int


def paired_difference(first: Iterable[Row], second: Iterable[Row]) -> Difference:
    """tau of `first` less tau of `second` on the requests that both have.

    Rows pair by request, and by drafter where both sides are of the same drafters (two modes of several drafts). Where
    they are of different ones, as many on each side (two kinds of drafts of several seeds), drafters pair in the order
    of their names.
    """
    first, second = list(first), list(second)
    mine, other = (_by_request_and_drafter(side) for side in (first, second))
    names, others = {r.drafter for r in first}, {r.drafter for r in second}
    if names != others:
        assert min(len(names), len(others)) == 0 or len(names) == len(others), "a request stands twice on one side"
        mine, other = _numbered(mine), _numbered(other)
    assert len(mine) == len(first) and len(other) == len(second), "a request stands twice on one side"
    pairs = [(row, other[key]) for key, row in sorted(mine.items()) if key in other]
    if not pairs:
        return Difference(math.nan, (math.nan, math.nan), "not measured", 0)
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    taus = resampled([([r.num_emitted for r in rows], [r.num_cycles for r in rows]) for rows in sides])
    interval = ends(taus[0] - taus[1])
    return Difference(tau_of(sides[0]) - tau_of(sides[1]), interval, verdict(interval), len(pairs))


def _by_request_and_drafter(rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    """Rows by what was asked of whom; the drafter is the key's last part."""
    return {
        (r.request, r.benchmark, r.turn, r.budget, r.temperature, r.max_new_tokens, r.drafter): r for r in rows
    }  # fmt: skip


def _numbered(rows: Mapping[tuple[Any, ...], Row]) -> dict[tuple[Any, ...], Row]:
    """The same rows, with the drafter's number among its side's in place of its name."""
    numbers = {name: number for number, name in enumerate(sorted({key[-1] for key in rows}))}
    return {(*key[:-1], numbers[key[-1]]): row for key, row in rows.items()}


@dataclass(frozen=True)
class SeedDifference:
    """The same difference for each drafter (seed), with Student's 95% interval over drafters."""

    each: Mapping[str, float]
    mean: float
    interval: Interval
    verdict: Verdict

    @property
    def deviation(self) -> float:
        """Standard deviation over drafters."""
        return statistics.stdev(self.each.values())


def seed_difference(pairs: Mapping[str, tuple[Iterable[Row], Iterable[Row]]]) -> SeedDifference | None:
    """tau of the first rows less tau of the second, drafter by drafter; None for fewer than two drafters."""
    if len(pairs) < 2:
        return None
    each = {name: tau_of(first) - tau_of(second) for name, (first, second) in pairs.items()}
    mean = statistics.fmean(each.values())
    if math.isnan(mean):  # with one of the drafters no cycle was run
        return SeedDifference(each, mean, (mean, mean), "not measured")
    half = student_half_width(statistics.stdev(each.values()), len(each))
    return SeedDifference(each, mean, (mean - half, mean + half), verdict((mean - half, mean + half)))


def _time_shares(rows: Sequence[Row]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row.parts_s)
    sums = {name: sum(row.parts_s.get(name, 0.0) for row in rows) for name in names}
    return {name: ratio(seconds, sum(sums.values())) for name, seconds in sums.items()}
