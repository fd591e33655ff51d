"""Measured requests made by hand, for the tests of what is computed from them."""

import random

from draftsmith.eval.rows import Row

CELL = {"benchmark": "photos", "method": "M", "temperature": 0.0, "max_new_tokens": 64, "medium": "image"}
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
        **CELL, **TIMES, "request": request, "drafted": drafted, "nodes": nodes or drafted, "accepted": accepted,
        "emitted": emitted, "tokens": tuple(range(sum(emitted) + 1)), "plain_tokens": sum(emitted) + 1,
        "stop": "length", "identical": True,
    } | changes  # fmt: skip
    return Row(**values)


def random_rows(count, *, seed=0, gamma=5, **changes) -> list[Row]:
    """Requests that differ in everything that is measured."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        drafted = [rng.randint(1, gamma) for _ in range(rng.randint(3, 12))]
        accepted = [rng.randint(0, d) for d in drafted]
        times = {name: value * rng.uniform(0.5, 2) for name, value in TIMES.items()}
        rows.append(
            a_row(
                request=f"r{number}",
                accepted=accepted,
                drafted=tuple(drafted),
                nodes=tuple(d + rng.randint(0, 9) for d in drafted),
                emitted=tuple([*(a + 1 for a in accepted[:-1]), max(1, accepted[-1])]),
                **({"identical": rng.random() < 0.8} | times | changes),
            )
        )
    return rows
