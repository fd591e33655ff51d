"""Where decoding stood when it drew a picture, from the rows of a report: maps of its cells, and methods compared.

Letters: G cells along a side, n = G^2 cells, M = n - 1 cells that are drafted (the prefill gives the first).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..measure import Row, bootstrap, paired_difference, quartiles


def accepted_histogram(rows: Sequence[Row]) -> list[float]:
    """Share of cycles that emitted 1, 2, ...: accepted drafts and the bonus token, as tau counts."""
    lengths = [a + 1 for row in rows for a in row["accepted"]]
    return [lengths.count(length) / len(lengths) for length in range(1, max(lengths) + 1)]


def depth_map(accepted: Sequence[int], grid: int) -> Tensor:
    """[G,G] int64, the depth in its draft tree at which each token stood (ADT-Tree, figure 2).

    Accepted drafts stand at 1, 2, ... A token that was not drafted is the root of the tree after it and stands at 0:
    the prefill's and every cycle's bonus token.

    Args:
        accepted: drafts that each cycle accepted, a row's "accepted".
    """
    depths = [0]
    for count in accepted:
        depths += [*range(1, count + 1), 0]
    return _square(torch.tensor(depths), grid)


def cycle_map(values: Sequence[float], accepted: Sequence[int], grid: int) -> Tensor:
    """[G,G] float32, at each cell the value of the cycle that emitted it; not a number where the prefill did.

    Args:
        values: one of each cycle: tokens emitted, levels drafted ("drafted"), d or k of the adaptation.
    """
    counts = torch.tensor([count + 1 for count in accepted])
    spread = torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)
    return _square(torch.cat([spread.new_full((1,), float("nan")), spread]), grid)


def length_map(accepted: Sequence[int], grid: int) -> Tensor:
    """[G,G] float32, the number of tokens (bonus token included) of the cycle that emitted each cell."""
    return cycle_map([count + 1 for count in accepted], accepted, grid)


def cell_map(values: Tensor, grid: int) -> Tensor:
    """[n] or [M] values of cells -> [G,G]; M leaves the first cell without a number."""
    missing = grid * grid - len(values)
    assert missing in (0, 1), (len(values), grid)
    return torch.cat([values.new_full((missing,), float("nan"), dtype=torch.float32), values.float()]).view(grid, grid)


def mean_map(maps: Sequence[Tensor]) -> Tensor:
    """[G,G] float32 mean over pictures."""
    return torch.stack([m.float() for m in maps]).nanmean(0)


def _square(values: Tensor, grid: int) -> Tensor:
    assert len(values) == grid * grid, f"{len(values)} tokens of cycles and prefill, {grid * grid} cells"
    return values.view(grid, grid)


def compare(methods: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, Any]]:
    """tau, mean levels of a tree and SR of each method, as in a report's table: ADT-Tree's initialisations, say.

    `tau_difference` is to the first method, paired over requests (`measure.paired_difference`).
    """
    first = _unnamed(next(iter(methods.values())))
    found = {}
    for name, rows in methods.items():
        emitted, cycles = [r["emitted"] for r in rows], [r["cycles"] for r in rows]
        found[name] = {
            "requests": len(rows),
            "tau": sum(emitted) / max(1, sum(cycles)),
            "tau_interval": bootstrap(emitted, cycles),
            "tau_difference": paired_difference(_unnamed(rows), first),
            "mean_levels": statistics.fmean(d for r in rows for d in r["drafted"]),
            "SR": sum(r["plain_total_s"] for r in rows) / sum(r["total_s"] for r in rows),
            "SR_spread": quartiles([r["plain_total_s"] / r["total_s"] for r in rows]),
        }
    return found


def _unnamed(rows: Sequence[Row]) -> list[Row]:
    """Rows without their method's name, so that they pair by request alone."""
    return [{**row, "drafter": ""} for row in rows]
