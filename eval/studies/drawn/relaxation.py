"""Acceptance of one draft for each cell under LANTERN's relaxed rule, and the time of its bounds (tables 1, 3 and 9).

Letters: N cells, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor

from ....models.decoding.neighbours import NeighbourTable
from ...lantern import Lantern, LanternConfig

CYCLE_NODES = 59  # drafts that a cycle of the papers' trees verifies: what the rule is timed on


class Relaxed(NamedTuple):
    """How LANTERN meets one draft for each of N cells."""

    accept: Tensor  # [N] probability
    size: Tensor  # [N] int64, tokens in A, the draft included


def relaxed(
    config: LanternConfig, table: NeighbourTable, p: Tensor, drafts: Tensor, q: Tensor | None = None
) -> Relaxed:
    """Acceptance of `drafts` [N], the first of their cycles, under p [N,V].

    Args:
        q: [N,V] that the drafts were sampled from; None where they were chosen, and accepted with the mass of A.
    """
    rows = torch.arange(len(drafts), device=p.device)
    mass, size = Lantern(config, table, greedy=False).proximity(p, rows, drafts)
    if q is not None:
        mass = (mass / q[rows, drafts]).clamp(max=1.0)
    return Relaxed(mass, size)


class BoundCost(NamedTuple):
    """One bound of LANTERN over N drafts (tables 3 and 9)."""

    divergence: str
    delta: float
    accept: float  # mean probability
    size: float  # mean |A|
    ms: float  # median time of the sets of a cycle


def bound_cost(
    config: LanternConfig, table: NeighbourTable, p: Tensor, drafts: Tensor, *, repeats: int = 20
) -> BoundCost:
    """Acceptance of `drafts` [N] under p [N,V], and the time of a cycle's sets over `repeats` runs behind a warm-up."""
    outcome = relaxed(config, table, p, drafts)
    rule, times = Lantern(config, table, greedy=False), []
    rows = torch.arange(CYCLE_NODES, device=p.device) % len(drafts)
    for _ in range(repeats + 1):
        _wait(p.device)
        start = time.perf_counter()
        rule.proximity(p, rows, drafts[rows])
        _wait(p.device)
        times.append(1e3 * (time.perf_counter() - start))
    assert config.delta is not None
    return BoundCost(
        config.divergence, config.delta, float(outcome.accept.mean()), float(outcome.size.float().mean()),
        statistics.median(times[1:]),
    )  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
