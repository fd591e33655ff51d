"""Measured requests made by hand, for the tests of what is computed from them."""

import random

from draftsmith.eval.cells import MethodInfo
from draftsmith.eval.measured_rows import Row

CELL = {"benchmark": "photos", "method": "M", "temperature": 0.0, "max_new_tokens": 64, "medium": "image"}
REPORTED = {
    "benchmark": "pictures", "turn": "", "budget": "", "temperature": 0.0, "max_new_tokens": 64, "method": "M",
    "requests": 12, "answers": 12, "tau": 4.0, "tau_interval": [3.9, 4.3], "DSR": 1.4, "DSR_spread": [1.2, 1.6],
    "ESR": 1.2, "identical": 12, "exact": True, "relaxed": False, "expected_speedup": 1.5, "drafters": ["finetune"],
}  # fmt: skip
TIMES = {
    "plain_prefill_s": 0.1, "plain_total_s": 1.0, "plain_cycle_s": 0.02, "prefill_s": 0.1, "total_s": 0.8,
    "draft_s": 0.005, "draft_cycle_s": 0.02, "verify_s": 0.02, "rule_s": 0.001, "cycle_s": 0.045,
}  # fmt: skip


def a_row(*, request="r0", accepted=(2, 1, 0), gamma=5, nodes=None, **changes) -> Row:
    """A row whose cycles each emit what they accepted and the bonus token."""
    accepted = tuple(accepted)
    drafted = changes.pop("drafted", (gamma,) * len(accepted))
    emitted = changes.pop("emitted", tuple(a + 1 for a in accepted))
    values = {
        **CELL, **TIMES, "request": request, "planned": drafted, "drafted": drafted,
        "nodes": nodes or drafted, "accepted": accepted, "emitted": emitted,
        "tokens": tuple(range(sum(emitted) + 1)), "plain_tokens": sum(emitted) + 1,
        "stop": "length", "identical": True,
    } | changes  # fmt: skip
    return Row(**values)


NO_TIMES = dict.fromkeys(("plain_cycle_s", "draft_s", "draft_cycle_s", "verify_s", "rule_s", "cycle_s"), 0.0)


def empty_row(**changes) -> Row:
    """A request whose answer ended with its first token: no cycle was run."""
    return a_row(**{"accepted": (), "total_s": 0.1, "plain_total_s": 0.1, **NO_TIMES} | changes)


def random_rows(count, *, seed=0, gamma=5, **changes) -> list[Row]:
    """Requests that differ in everything that is measured."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        drafted = [rng.randint(1, gamma) for _ in range(rng.randint(3, 12))]
        accepted = [rng.randint(0, d) for d in drafted]
        times = {name: value * rng.uniform(0.5, 2) for name, value in TIMES.items()}
        values = {
            "request": f"r{number}", "accepted": accepted, "planned": (gamma,) * len(drafted),
            "drafted": tuple(drafted), "nodes": tuple(d + rng.randint(0, 9) for d in drafted),
            "emitted": tuple([*(a + 1 for a in accepted[:-1]), max(1, accepted[-1])]),
        }  # fmt: skip
        rows.append(a_row(**values, **({"identical": rng.random() < 0.8} | times | changes)))
    return rows


METHODS = {
    "M": MethodInfo("finetune", "M", "chain of 5", 5),
    "T": MethodInfo("finetune", "T", "chain of 5", 5),
    "EAGLE": MethodInfo("eagle", tree="30-4-8", levels=4),
}


def measured_rows(**changes):
    """Three methods on two sets."""
    values = {"identical": True, **changes}
    of = {"drafter": "finetune", "benchmark": "pictures", **values}
    result = []
    for benchmark in ("pictures", "clips"):
        result += random_rows(6, seed=1, **(of | {"method": "M", "mode": "M", "benchmark": benchmark}))
        result += random_rows(6, seed=2, **(of | {"method": "T", "mode": "T", "benchmark": benchmark}))
        result += random_rows(6, seed=3, **(of | {"method": "EAGLE", "drafter": "eagle", "benchmark": benchmark}))
    return result


MEASURED = {"requests": 12, "answers": 12, "drafters": [], "tau": 4.096, "tau_interval": [3.9, 4.3], "DSR": 1.446,
            "DSR_spread": [1.2, 1.6], "expected_speedup": 1.5, "ESR": 1.2, "identical": 12, "exact": True,
            "relaxed": False}  # fmt: skip


def report_of(*cells, **common):
    """A report as `eval/report.py` writes it, in what is read back."""
    place = {"benchmark": "pictures", "turn": "", "budget": "", "temperature": 0.0, "max_new_tokens": 64, "method": "M"}
    return {"version": 2, "cells": [place | MEASURED | common | cell for cell in cells or ({},)]}
