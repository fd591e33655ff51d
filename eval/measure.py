"""From decoded requests to the numbers of a report.

tau (block efficiency) is tokens emitted after the prefill over verification passes, over the whole
set, cut cycles included, with the bonus token; plain decoding has 1 (TABED, section 2; vocabulary of
the design). Every number is computed from per-request rows, so shards merge exactly.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

from .loop import Generation

Row = dict[str, Any]


def measure_request(name: str, drafter: str, plain: Sequence[Generation], drafted: Sequence[Generation]) -> Row:
    """One request, decoded a few times plainly and with a drafter; times are medians over the repeats.

    Args:
        drafter: the stage that trained it.
    """
    first, cycles = drafted[0], drafted[0].cycles
    return {
        "request": name,
        "drafter": drafter,
        "identical": all(g.tokens == plain[0].tokens for g in (*plain, *drafted)),
        "tokens": first.tokens,
        "plain_tokens": len(plain[0].tokens),
        "stop": first.stop,
        "emitted": sum(c.num_emitted for c in cycles),
        "cycles": len(cycles),
        "drafted": [c.num_drafted for c in cycles],
        "accepted": [c.num_accepted for c in cycles],
        "plain_prefill_s": _median([g.prefill_s for g in plain]),
        "plain_total_s": _median([g.total_s for g in plain]),
        "plain_cycle_s": _median([c.total_s for g in plain for c in g.cycles]),
        "prefill_s": _median([g.prefill_s + g.draft_prefill_s for g in drafted]),
        "total_s": _median([g.total_s for g in drafted]),
        "draft_s": _median([c.draft_s / c.num_drafted for g in drafted for c in g.cycles if c.num_drafted]),
        "verify_s": _median([c.verify_s for g in drafted for c in g.cycles]),
        "cycle_s": _median([c.total_s for g in drafted for c in g.cycles]),
        "parts_s": {key: _median([time_parts(g)[key] for g in drafted]) for key in time_parts(first)},
    }


def time_parts(generation: Generation) -> dict[str, float]:
    """Seconds of each operation of a request; `others` is what is left of the whole (committing, bookkeeping)."""
    cycles = generation.cycles
    parts = {
        "target_prefill": generation.prefill_s,
        "draft_prefill": generation.draft_prefill_s - generation.pruning_s,
        "token_pruning": generation.pruning_s,
        "verification": sum(c.verify_s for c in cycles),
        "drafting": sum(c.draft_s for c in cycles),
        "tree_update": sum(c.update_s for c in cycles),
    }
    return parts | {"others": max(0.0, generation.total_s - sum(parts.values()))}


def summarize(rows: Sequence[Row], *, gamma: int) -> dict[str, Any]:
    """The table of one benchmark and mode. `rows` may come from any number of ranks, in any order."""
    rows = sorted(rows, key=_key)
    emitted, cycles = sum(r["emitted"] for r in rows), sum(r["cycles"] for r in rows)
    drafted, accepted = sum(sum(r["drafted"]) for r in rows), sum(sum(r["accepted"]) for r in rows)
    tau = emitted / cycles if cycles else 1.0
    t_p, t_q, t_verify = (_median([r[k] for r in rows]) for k in ("plain_cycle_s", "draft_s", "verify_s"))
    ratio = t_q / t_p if t_p else 0.0
    each = [speedups([row]) for row in rows]
    return {
        "requests": len(rows),
        "tau": tau,
        "tau_interval": bootstrap([r["emitted"] for r in rows], [r["cycles"] for r in rows]),
        "tau_mean_of_requests": _mean([r["emitted"] / r["cycles"] for r in rows if r["cycles"]]),
        "num_accepted": accepted / cycles if cycles else 0.0,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "accepted_by_depth": by_depth(rows, gamma),
        "T_q_ms": 1e3 * t_q,
        "T_p_ms": 1e3 * t_p,
        "T_verify_ms": 1e3 * t_verify,
        "T_q_over_T_p": ratio,
        "expected_speedup": tau / (gamma * ratio + (t_verify / t_p if t_p else 1.0)),
        "expected_speedup_tabed": tau / (gamma * ratio + 1),
        **speedups(rows),
        "DSR_spread": quartiles([found["DSR"] for found in each]),
        "ESR_spread": quartiles([found["ESR"] for found in each]),
        "prefill_share": _ratio(sum(r["prefill_s"] for r in rows), sum(r["total_s"] for r in rows)),
        "identical": sum(r["identical"] for r in rows),
        "first_different": next((r["request"] for r in rows if not r["identical"]), None),
        "rejected_somewhere": accepted < drafted,
        "beyond_positions": sum(r.get("beyond_positions", False) for r in rows),
    }


def speedups(rows: Sequence[Row]) -> dict[str, float]:
    """DSR and ESR: seconds a token of plain decoding over those of drafting, without the prefill and with it.

    A token's, since sampled answers of the two differ in length; of equal answers it is the ratio of times.
    """
    plain_total, total = sum(r["plain_total_s"] for r in rows), sum(r["total_s"] for r in rows)
    plain_prefill, prefill = sum(r["plain_prefill_s"] for r in rows), sum(r["prefill_s"] for r in rows)
    # The first token comes from the prefill.
    plain_tokens, tokens = sum(r["plain_tokens"] for r in rows), sum(r["emitted"] for r in rows) + len(rows)
    decoded, plain_decoded = tokens - len(rows), plain_tokens - len(rows)
    return {
        "DSR": _ratio((plain_total - plain_prefill) * decoded, (total - prefill) * plain_decoded),
        "ESR": _ratio(plain_total * tokens, total * plain_tokens),
    }


def by_depth(rows: Sequence[Row], gamma: int) -> list[dict[str, float]]:
    """Per depth: how often it was drafted, and the share accepted of those drafted and of those reached."""
    pairs = [(d, a) for r in rows for d, a in zip(r["drafted"], r["accepted"], strict=True)]
    found = []
    for depth in range(1, gamma + 1):
        drafted = sum(d >= depth for d, _ in pairs)
        reached = sum(d >= depth and a >= depth - 1 for d, a in pairs)
        accepted = sum(a >= depth for _, a in pairs)
        found.append(
            {
                "depth": depth,
                "drafted": drafted,
                "share": accepted / drafted if drafted else 0.0,
                "share_of_reached": accepted / reached if reached else 0.0,
            }
        )
    return found


def bootstrap(
    parts: Sequence[float], wholes: Sequence[float], *, draws: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """95% interval of sum(parts) / sum(wholes) over resampled requests."""
    rng, n = random.Random(seed), len(parts)
    values = []
    for _ in range(draws if n else 0):
        picks = [rng.randrange(n) for _ in range(n)]
        whole = sum(wholes[i] for i in picks)
        values.append(sum(parts[i] for i in picks) / whole if whole else 1.0)
    return _interval(values)


def paired_difference(
    first: Sequence[Row], second: Sequence[Row], *, draws: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """tau of `first` minus tau of `second` on the same requests, with a paired 95% bootstrap interval."""
    other = {_key(r): r for r in second}
    pairs = [(r, other[_key(r)]) for r in sorted(first, key=_key) if _key(r) in other]
    rng, n = random.Random(seed), len(pairs)
    values = []
    for _ in range(draws if n else 0):
        picks = [pairs[rng.randrange(n)] for _ in range(n)]
        values.append(_tau(a for a, _ in picks) - _tau(b for _, b in picks))
    low, high = _interval(values)
    difference = _tau(a for a, _ in pairs) - _tau(b for _, b in pairs)
    return {"difference": difference, "interval": (low, high), "verdict": _verdict(low, high), "requests": n}


def difference_by_drafter(first: Sequence[Row], second: Sequence[Row]) -> dict[str, Any] | None:
    """The same difference for each drafter, with Student's 95% interval over drafters (seeds); None for one drafter."""
    names = sorted({r["drafter"] for r in first})
    if len(names) < 2:
        return None
    each = {
        n: _tau(r for r in first if r["drafter"] == n) - _tau(r for r in second if r["drafter"] == n) for n in names
    }
    mean, spread = statistics.fmean(each.values()), statistics.stdev(each.values())
    half = student_half_width(spread, len(names))
    low, high = mean - half, mean + half
    return {"each": each, "mean": mean, "interval": (low, high), "verdict": _verdict(low, high)}


def student_half_width(deviation: float, count: int) -> float:
    """Half of Student's 95% interval of the mean of `count` values with this standard deviation."""
    return _STUDENT_975.get(count, 1.96) * deviation / count**0.5


# 97.5% points of Student's t for 2 to 10 values (1 to 9 degrees of freedom).
_STUDENT_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _key(row: Row) -> tuple[str, str]:
    return row["drafter"], row["request"]


def _verdict(low: float, high: float) -> str:
    return "above 0" if low > 0 else "below 0" if high < 0 else "includes 0"


def _tau(rows: Any) -> float:
    emitted = cycles = 0
    for row in rows:
        emitted, cycles = emitted + row["emitted"], cycles + row["cycles"]
    return emitted / cycles if cycles else 1.0


def _interval(values: list[float]) -> tuple[float, float]:
    values.sort()
    return (values[int(0.025 * len(values))], values[int(0.975 * len(values))]) if values else (0.0, 0.0)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 0.0


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
