"""Maps of a picture's cells from the rows of a report: depth and number of tokens of the cycle that drew each cell.

Letters: G cells along a side, n = G^2 cells, M = n - 1 cells that are drafted (the prefill gives the first).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def depth_map(accepted: Sequence[int], grid: int) -> Tensor:
    """[G,G] int64, the depth in its draft tree at which each token stood (ADT-Tree, figure 2).

    Accepted drafts stand at 1, 2, ... A token that was not drafted is the root of the tree after it and stands at 0:
    the prefill's and every cycle's bonus token.

    Args:
        accepted: drafts that each cycle accepted, `Row.accepted`.
    """
    depths = [0]
    for count in accepted:
        depths += [*range(1, count + 1), 0]
    return _square(torch.tensor(depths), grid)


def length_map(accepted: Sequence[int], grid: int) -> Tensor:
    """[G,G] float32, the number of tokens (bonus token included) of the cycle that emitted each cell; not a number
    where the prefill did.
    """
    counts = torch.tensor([count + 1 for count in accepted])
    spread = counts.float().repeat_interleave(counts)
    return _square(torch.cat([spread.new_full((1,), float("nan")), spread]), grid)


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
