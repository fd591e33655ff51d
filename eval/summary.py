"""Numbers of one method on one set of requests, and differences between two: all from rows, with one bootstrap.

tau (block efficiency) is tokens emitted after the prefill over verification passes, over the whole set, cut cycles
included, with the bonus token; plain decoding has 1 (TABED, section 2; docs/words.md). Intervals do not depend on the
number of ranks or on the order in which rows were measured: requests are sorted by name and resampled from one seed,
each with the answers of all its drafters.

A ratio over nothing (no cycle, nothing drafted) is NaN: tables show a dash, JSON has null. An answer that ends with its
first token has no cycle.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import numpy as np

from ..core.json_types import JsonObject
from .measured_rows import KEY, Frame, Row, cycles_of, frame

AnyRows: TypeAlias = "Iterable[Row] | Frame"
REQUEST = [name for name in KEY if name not in ("method", "mode", "drafter")]  # what identifies a request
Interval = tuple[float, float]
Verdict = Literal["above 0", "below 0", "includes 0", "not measured"]
DRAWS, SEED = 1000, 0  # of every bootstrap


@dataclass(frozen=True)
class Depth:
    """What was drafted at one depth of the trees."""

    depth: int  # from 1
    drafted: int  # cycles whose tree had this level
    share: float  # of these, where a token of it was accepted
    share_of_reached: float | None  # of those where all before it were accepted, too; None where none was


class Summary(SimpleNamespace):
    """One method on one set of requests: the numbers that `summarize` lists, each with its formula."""

    @property
    def is_measured(self) -> bool:
        """Whether a cycle was run: without one there is neither tau nor a speedup of decoding."""
        return bool(self.calls > 0)

    def to_json(self) -> JsonObject:
        """Name -> value of every number."""
        return vars(self) | {"accepted_by_depth": [asdict(depth) for depth in self.accepted_by_depth]}


def summarize(rows: AnyRows) -> Summary:
    """The numbers of some rows, which may come from any number of ranks, in any order.

    Times in ms are medians over answers of each answer's median; times in s are means over answers. Speedups are
    against plain decoding of the same target in the same run, of a token: sampled answers differ in length.
    """
    answers = frame(rows).sort_values([*KEY], key=lambda column: column.astype(str))  # the bootstrap counts on it
    assert len(answers), "no request to summarize"
    cycles, totals = cycles_of(answers), answers.sum(numeric_only=True)
    # An answer without a cycle has no times of one: its zeros would pull every median down.
    with_cycles, drafting = answers[answers.num_cycles > 0], answers[answers.num_drafted > 0]
    medians = with_cycles[["draft_cycle_s", "verify_s", "rule_s", "cycle_s"]].median()
    t_q = drafting.draft_s.median()
    t_p = answers.plain_cycle_s[answers.plain_decoded > 0].median()
    tau, kept_depth = cycles.emitted.mean(), cycles.drafted.mean()
    planned_depth = cycles.planned[cycles.planned > 0].mean()
    relative = ratio(t_q, t_p)
    kept_cost, planned_cost = (depth * relative if len(drafting) else 0.0 for depth in (kept_depth, planned_depth))
    parts = seconds_of_parts(answers)
    (dsr, esr), (dsr_of_each, esr_of_each) = speedups(totals), speedups(answers)
    requests = answers.groupby(REQUEST, sort=False)[["num_emitted", "num_cycles"]].sum()
    named = zip(answers.request, answers.details, strict=True)
    differences = [{"request": name, **details["difference"]} for name, details in named if "difference" in details]
    skipped = answers[["skipped_cycles" in details for details in answers.details]]
    numbers = {
        "requests": len(requests),
        "answers": len(answers),  # of all drafters: several decode the same requests
        "tau": tau,
        "tau_interval": ends(*resampled([(requests.num_emitted, requests.num_cycles)])),  # 95%, over resampled requests
        "tau_mean_of_requests": (with_cycles.num_emitted / with_cycles.num_cycles).mean(),
        "num_accepted": cycles.accepted.mean(),  # in a cycle, without the bonus token (SAGE's tau)
        "acceptance_rate": ratio(totals.num_accepted, totals.num_drafted),  # of the drafted levels
        "first_accepted": (cycles.accepted > 0).mean(),  # share of cycles that accepted a draft
        "accepted_by_depth": _by_depth(cycles),
        "accepted_histogram": tuple(np.bincount(cycles.accepted, minlength=1).tolist()),  # cycles that accepted 0, 1...
        "levels": max(cycles.planned, default=0),  # that the deepest tree was to have; gamma of a chain
        # Levels that a tree was to have, of the cycles that drafted (ADT-Tree's mean depth d), whatever ended answers.
        "planned_depth": planned_depth,
        "kept_depth": kept_depth,  # levels that it had when it was verified, of all cycles
        "tau_over_depth": ratio(tau, planned_depth),  # ADT-Tree's acceptance rate alpha as section III-B defines it
        "mean_nodes": cycles.nodes.mean(),
        "T_q_ms": 1e3 * t_q,  # drafting, for each level
        "T_p_ms": 1e3 * t_p,  # a step of plain decoding
        "T_verify_ms": 1e3 * medians.verify_s,  # a verification pass with its rule
        "T_q_over_T_p": relative,
        "expected_speedup": tau / (kept_cost + ratio(medians.verify_s, t_p)),
        "expected_speedup_tabed": tau / (planned_cost + 1),  # TABED, equation 1
        "DSR": dsr,  # speedup of decoding alone
        "ESR": esr,  # speedup end to end
        "DSR_spread": quartiles(dsr_of_each.tolist()),  # over answers
        "ESR_spread": quartiles(esr_of_each.tolist()),
        "drafter_ms": 1e3 * medians.draft_cycle_s,  # of a cycle
        "target_ms": 1e3 * (medians.verify_s - medians.rule_s),  # of a cycle, without the rule
        "rule_ms": 1e3 * medians.rule_s,
        "cycle_ms": 1e3 * medians.cycle_s,
        "prefill_share": ratio(totals.prefill_s, totals.total_s),  # of the time end to end
        **{name: totals[name] / len(answers) for name in ("total_s", "decode_s", "prefill_s", "plain_total_s",
                                                          "plain_prefill_s", "visual_tokens", "generated")},
        "step_s": ratio(totals.decode_s, totals.num_cycles),  # a cycle, everything included
        "tokens_per_s": ratio(totals.generated, totals.total_s),  # end to end
        "decoded_per_s": ratio(totals.num_emitted, totals.decode_s),  # without the prefill
        "plain_tokens_per_s": ratio(totals.plain_tokens, totals.plain_total_s),
        "plain_decoded_per_s": ratio(totals.plain_decoded, totals.plain_decode_s),
        "calls": totals.num_cycles / len(answers),  # verification passes of an answer
        "time_shares": {name: ratio(seconds, sum(parts.values())) for name, seconds in parts.items()},
        "identical": answers.identical.sum(),  # answers whose tokens are plain decoding's
        "first_different": next(iter(answers.request[~answers.identical]), None),
        "ties": sum(d["tie"] for d in differences),  # that differ where the target's two scores nearly tie
        # Of the others and of these, the widest gap first (first_difference.py).
        "differences": sorted(differences, key=lambda d: (d["tie"], -math.inf if d["ulps"] is None else -d["ulps"])),
        "rejected_somewhere": totals.num_accepted < totals.num_drafted,
        # Answers that go beyond the draft's positions.
        "beyond_positions": sum(bool(details.get("beyond_positions", False)) for details in answers.details),
        # Share of the cycles that drafted nothing by ViSkip; None: it was off.
        "skipped": ratio(sum(details["skipped_cycles"] for details in skipped.details), skipped.num_cycles.sum())
                   if len(skipped) else None,
    }  # fmt: skip
    return Summary(**{name: n.item() if isinstance(n, np.generic) else n for name, n in numbers.items()})


def seconds_of_parts(answers: Frame) -> dict[str, float]:
    """Operation -> its seconds in all answers (`measured_rows.time_parts`)."""
    names = dict.fromkeys(name for parts in answers.parts_s for name in parts)
    return {name: sum(parts.get(name, 0.0) for parts in answers.parts_s) for name in names}


def speedups(of: Any) -> tuple[Any, Any]:
    """DSR and ESR of the answers of a frame, or of their sums: seconds a token of plain decoding over those of
    drafting, without the prefill and with it. Of equal answers the tokens cancel.
    """
    return (
        ratio(of.plain_decode_s * of.num_emitted, of.decode_s * of.plain_decoded),
        ratio(of.plain_total_s * of.generated, of.total_s * of.plain_tokens),
    )


def _by_depth(cycles: Frame) -> tuple[Depth, ...]:
    """Per depth: how often it was drafted, and the share accepted of those drafted and of those reached."""
    depths = np.arange(1, 1 + max(cycles.drafted, default=0))[:, None]  # [depth, cycle] below
    drafted, accepted = cycles.drafted.to_numpy() >= depths, cycles.accepted.to_numpy() >= depths
    reached = drafted & (cycles.accepted.to_numpy() >= depths - 1)
    counts, right = drafted.sum(1), accepted.sum(1)
    per_depth = enumerate(zip(counts.tolist(), right.tolist(), reached.sum(1).tolist(), strict=True), 1)
    return tuple(Depth(d, n, hits / n, hits / tried if tried else None) for d, (n, hits, tried) in per_depth)


def tau_of(rows: AnyRows) -> float:
    """Tokens of all cycles over cycles; NaN without a cycle."""
    answers = frame(rows)
    return float(ratio(answers.num_emitted.sum(), answers.num_cycles.sum()))


@dataclass(frozen=True)
class Difference:
    """tau of one method less that of another, on the same requests."""

    difference: float
    interval: Interval  # 95%, paired bootstrap over requests
    verdict: Verdict
    requests: int


def paired_difference(first: AnyRows, second: AnyRows) -> Difference:
    """tau of `first` less tau of `second` on the requests that both have.

    Rows pair by request, and by drafter where both sides are of the same drafters (two modes of several drafts). Where
    they are of different ones, as many on each side (two kinds of drafts of several seeds), drafters pair in the order
    of their names. The bootstrap resamples requests, each with the pairs of all drafters.
    """
    sides = [frame(first), frame(second)]
    names = [set(side.drafter) for side in sides]
    if names[0] != names[1]:
        assert len(names[0]) == len(names[1]), "a request stands twice on one side"
        sides = [side.assign(drafter=side.drafter.rank(method="dense")) for side in sides]
    key = [*REQUEST, "drafter"]
    assert not any(side.duplicated(key).any() for side in sides), "a request stands twice on one side"
    pairs = sides[0].merge(sides[1], on=key).sort_values(key)
    if pairs.empty:
        return Difference(math.nan, (math.nan, math.nan), "not measured", 0)
    numbers = [f"num_{what}_{side}" for side in "xy" for what in ("emitted", "cycles")]
    pairs = pairs.groupby(REQUEST, sort=False)[numbers].sum()
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


def seed_difference(pairs: Mapping[str, tuple[Iterable[Row], Iterable[Row]]]) -> SeedDifference | None:
    """tau of the first rows less tau of the second, drafter by drafter; None for fewer than two drafters."""
    if len(pairs) < 2:
        return None
    each = {name: tau_of(first) - tau_of(second) for name, (first, second) in pairs.items()}
    mean, low, high = student_interval([*each.values()])
    return SeedDifference(each, mean, (low, high), verdict((low, high)))


def mean(values: Sequence[float | None]) -> float | None:
    """None where a value is missing: an average over other sets would not compare."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return statistics.fmean(known) if known and len(known) == len(values) else None


# ---- Of plain numbers: one bootstrap over requests, Student's t over seeds, quartiles


def student_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of two values or more, and the ends of Student's 95% interval of it."""
    mean, half = np.mean(values), student_975(len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return float(mean), float(mean - half), float(mean + half)


# 97.5% points of Student's t for 1 to 9 degrees of freedom.
_STUDENT_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def student_975(degrees: int) -> float:
    """The 97.5% point of Student's t, to 0.001 (from 10 degrees on by its expansion in 1 / degrees)."""
    if degrees <= len(_STUDENT_975):
        return _STUDENT_975[degrees - 1]
    z, n = 1.959964, degrees
    cubic = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + cubic


def quartiles(values: Sequence[float]) -> Interval:
    """The first and the third, of those values that are numbers."""
    values = [value for value in values if not math.isnan(value)] or [math.nan]
    low, high = np.quantile(values, [0.25, 0.75]).tolist()
    return low, high


def verdict(interval: Interval) -> Verdict:
    """On which side of 0 both ends lie ("above 0", "below 0"); else "includes 0", also where an end is 0."""
    low, high = interval
    if math.isnan(low) or math.isnan(high):
        return "not measured"
    return "above 0" if low > 0 else "below 0" if high < 0 else "includes 0"


def ratio(numerator: Any, denominator: Any) -> Any:
    """Divide numbers, or columns of them; NaN where there is nothing to divide by."""
    if np.ndim(denominator):
        return numerator / denominator.where(denominator > 0)
    return numerator / denominator if denominator > 0 else math.nan


def resampled(ratios: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[np.ndarray]:
    """[DRAWS] of each ratio of sums over the same resampled requests; NaN of requests whose wholes are 0."""
    count = len(ratios[0][0])
    rng, at_once = np.random.default_rng(SEED), max(1, 2**22 // count)  # of many requests a few draws at a time
    values: list[list[np.ndarray]] = [[] for _ in ratios]
    for start in range(0, DRAWS, at_once):
        picks = rng.integers(count, size=(min(at_once, DRAWS - start), count))
        for taken, (parts, wholes) in zip(values, ratios, strict=True):
            whole = np.asarray(wholes)[picks].sum(1)
            divided = np.asarray(parts)[picks].sum(1) / np.where(whole > 0, whole, 1)
            taken.append(np.where(whole > 0, divided, math.nan))
    return [np.concatenate(taken) for taken in values]


def ends(values: np.ndarray) -> Interval:
    """Of 95% of the values, NaN left out."""
    values = np.sort(values[~np.isnan(values)])
    if not len(values):
        return (math.nan, math.nan)
    return float(values[int(0.025 * len(values))]), float(values[int(0.975 * len(values))])
