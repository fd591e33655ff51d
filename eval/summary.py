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
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.json_types import JsonMapping, JsonObject
from .intervals import (
    Interval,
    Verdict,
    bootstrap,
    ends,
    quartiles,
    ratio,
    resampled,
    student_half_width,
    verdict,
)
from .measured_rows import Row
from .row_columns import COUNTS, KEY, PER_CYCLE, TIMES, Rows

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Depth:
    """What was drafted at one depth of the trees."""

    depth: int  # from 1
    drafted: int  # cycles whose tree had this level
    share: float  # of these, where a token of it was accepted
    share_of_reached: float | None  # of those where all before it were accepted, too; None where none was


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
    differences: tuple[JsonMapping, ...] = ()  # of the others and of these, the widest gap first
    rejected_somewhere: bool = False
    beyond_positions: int = 0  # requests that go beyond the draft's positions
    skipped: float | None = None  # share of the cycles that drafted nothing by ViSkip; None: it was off

    @property
    def is_measured(self) -> bool:
        """Whether a cycle was run: without one there is neither tau nor a speedup of decoding."""
        return self.calls > 0

    def to_json(self) -> JsonObject:
        """Field name -> value of every field; what explains differences, and ViSkip's, only where there are some."""
        left_out = {"ties", "differences"} if not self.differences else set()
        left_out |= {"skipped"} if self.skipped is None else set()
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def summarize(rows: Iterable[Row]) -> Summary:
    """The numbers of some rows, which may come from any number of ranks, in any order."""
    rows = Rows(rows).ordered()
    assert rows, "no request to summarize"
    requests, cycles = frames(rows)
    totals, of_cycle = requests.sum(numeric_only=True), cycles.mean()
    of_request = totals / len(requests)
    # A request without a cycle has no times of one: its zeros would pull every median down.
    with_cycles, drafting = requests[requests.num_cycles > 0], requests[requests.num_drafted > 0]
    medians = with_cycles[["draft_cycle_s", "verify_s", "rule_s", "cycle_s"]].median()
    t_q = drafting.draft_s.median()
    t_p = requests.plain_cycle_s[requests.plain_decoded > 0].median()
    tau, kept_depth = of_cycle.emitted, of_cycle.drafted
    planned_depth = cycles.planned[cycles.planned > 0].mean()  # gamma of a chain, whatever ended its answers
    relative = ratio(t_q, t_p)
    kept_cost, planned_cost = (depth * relative if len(drafting) else 0.0 for depth in (kept_depth, planned_depth))
    parts = {name: sum(seconds.tolist()) for name, seconds in rows.parts().items()}
    (dsr, esr), (dsr_of_each, esr_of_each) = _speedups(totals), _speedups(requests)
    numbers = {
        "requests": len(requests),
        "tau": tau,
        "tau_mean_of_requests": (with_cycles.num_emitted / with_cycles.num_cycles).mean(),
        "num_accepted": of_cycle.accepted,
        "acceptance_rate": ratio(totals.num_accepted, totals.num_drafted),
        "first_accepted": (cycles.accepted > 0).mean(),
        "levels": max(cycles.planned, default=0),
        "planned_depth": planned_depth,
        "kept_depth": kept_depth,
        "tau_over_depth": ratio(tau, planned_depth),
        "mean_nodes": of_cycle.nodes,
        "T_q_ms": 1e3 * t_q,
        "T_p_ms": 1e3 * t_p,
        "T_verify_ms": 1e3 * medians.verify_s,
        "T_q_over_T_p": relative,
        "expected_speedup": tau / (kept_cost + ratio(medians.verify_s, t_p)),
        "expected_speedup_tabed": tau / (planned_cost + 1),
        "DSR": dsr,
        "ESR": esr,
        "drafter_ms": 1e3 * medians.draft_cycle_s,
        "target_ms": 1e3 * (medians.verify_s - medians.rule_s),
        "rule_ms": 1e3 * medians.rule_s,
        "cycle_ms": 1e3 * medians.cycle_s,
        "prefill_share": ratio(totals.prefill_s, totals.total_s),
        **of_request[["total_s", "decode_s", "prefill_s", "plain_total_s", "plain_prefill_s", "visual_tokens"]],
        "step_s": ratio(totals.decode_s, totals.num_cycles),
        "tokens_per_s": ratio(totals.generated, totals.total_s),
        "decoded_per_s": ratio(totals.num_emitted, totals.decode_s),
        "plain_tokens_per_s": ratio(totals.plain_tokens, totals.plain_total_s),
        "plain_decoded_per_s": ratio(totals.plain_decoded, totals.plain_decode_s),
        "generated": of_request.generated,
        "calls": of_request.num_cycles,
        "identical": requests.identical.sum(),
        "rejected_somewhere": totals.num_accepted < totals.num_drafted,
    }
    return Summary(
        **{name: number.item() if isinstance(number, np.generic) else number for name, number in numbers.items()},
        tau_interval=bootstrap(requests.num_emitted, requests.num_cycles),
        accepted_by_depth=_by_depth(cycles),
        accepted_histogram=tuple(np.bincount(cycles.accepted, minlength=1).tolist()),
        DSR_spread=quartiles(dsr_of_each.tolist()),
        ESR_spread=quartiles(esr_of_each.tolist()),
        time_shares={name: ratio(seconds, sum(parts.values())) for name, seconds in parts.items()},
        first_different=next(iter(rows.where(~rows.numbers("identical")).texts("request")), None),
        **_differences(rows),
        beyond_positions=sum(bool(details.get("beyond_positions", False)) for details in rows.details()),
        skipped=_skipped(rows),
    )


def frames(rows: Rows) -> tuple[DataFrame, DataFrame]:
    """Two tables in the order of `rows`: a line for each request, and a line for each cycle after a prefill."""
    from pandas import DataFrame  # takes a second, which nobody is to pay who makes no report

    requests = DataFrame({name: rows.numbers(name) for name in (*COUNTS, *TIMES)})
    requests["num_cycles"] = rows.num_cycles()
    for name in ("emitted", "drafted", "accepted"):
        requests[f"num_{name}"] = rows.sums(name)
    # The first token comes from the prefill: it is generated, and in no cycle.
    requests["generated"] = requests.num_emitted + 1
    requests["plain_decoded"] = requests.plain_tokens - 1
    requests["decode_s"] = requests.total_s - requests.prefill_s
    requests["plain_decode_s"] = requests.plain_total_s - requests.plain_prefill_s
    return requests, DataFrame({name: rows.cycles(name) for name in PER_CYCLE})


def _speedups(of: Any) -> tuple[Any, Any]:
    """DSR and ESR of the requests of `frames`, or of their sums: seconds a token of plain decoding over those of
    drafting, without the prefill and with it. Of equal answers the tokens cancel.
    """
    return (
        ratio(of.plain_decode_s * of.num_emitted, of.decode_s * of.plain_decoded),
        ratio(of.plain_total_s * of.generated, of.total_s * of.plain_tokens),
    )


def _by_depth(cycles: DataFrame) -> tuple[Depth, ...]:
    """Per depth: how often it was drafted, and the share accepted of those drafted and of those reached."""
    depths = np.arange(1, 1 + max(cycles.drafted, default=0))[:, None]  # [depth, cycle] below
    drafted, accepted = cycles.drafted.to_numpy() >= depths, cycles.accepted.to_numpy() >= depths
    reached = drafted & (cycles.accepted.to_numpy() >= depths - 1)
    counts, right = drafted.sum(1), accepted.sum(1)
    per_depth = enumerate(zip(counts.tolist(), right.tolist(), reached.sum(1).tolist(), strict=True), 1)
    return tuple(Depth(d, n, hits / n, hits / tried if tried else None) for d, (n, hits, tried) in per_depth)


def _differences(rows: Rows) -> JsonObject:
    """The fields of `Summary` that explain answers that are not plain decoding's, as far as rows say."""
    named = zip(rows.texts("request"), rows.details(), strict=True)
    known = [{"request": name, **details["difference"]} for name, details in named if "difference" in details]
    known.sort(key=lambda d: (d["tie"], -math.inf if d["ulps"] is None else -d["ulps"]))
    return {"ties": sum(d["tie"] for d in known), "differences": tuple(known)}


def _skipped(rows: Rows) -> float | None:
    known = [(n, d["skipped_cycles"]) for n, d in zip(rows.num_cycles(), rows.details(), strict=True)
             if "skipped_cycles" in d]  # fmt: skip
    return ratio(sum(skipped for _, skipped in known), sum(int(n) for n, _ in known)) if known else None


def tau_of(rows: Iterable[Row]) -> float:
    """Tokens of all cycles over cycles; NaN without a cycle."""
    rows = Rows(rows)
    return ratio(int(rows.sums("emitted").sum()), int(rows.num_cycles().sum()))


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
    nothing = Difference(math.nan, (math.nan, math.nan), "not measured", 0)
    first, second = Rows(first), Rows(second)
    if not first or not second:
        return nothing
    sides = [frames(rows)[0].assign(**{name: rows.texts(name) for name in KEY}) for rows in (first, second)]
    names = [set(side.drafter) for side in sides]
    if names[0] != names[1]:
        assert len(names[0]) == len(names[1]), "a request stands twice on one side"
        sides = [side.assign(drafter=side.drafter.rank(method="dense")) for side in sides]
    key = [*(name for name in KEY if name not in ("method", "mode", "drafter")), "drafter"]
    assert not any(side.duplicated(key).any() for side in sides), "a request stands twice on one side"
    pairs = sides[0].merge(sides[1], on=key).sort_values(key)
    if pairs.empty:
        return nothing
    ratios = [(pairs[f"num_emitted_{side}"], pairs[f"num_cycles_{side}"]) for side in "xy"]
    (one, other), (tau, others) = resampled(ratios), (ratio(tokens.sum(), cycles.sum()) for tokens, cycles in ratios)
    interval = ends(one - other)
    return Difference(float(tau - others), interval, verdict(interval), len(pairs))


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


def mean(values: Sequence[float | None]) -> float | None:
    """None where a value is missing: an average over other sets would not compare."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return statistics.fmean(known) if known and len(known) == len(values) else None
