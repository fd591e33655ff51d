"""Kinds of cells of drawn pictures, decided by the pixels of each cell: flat, textured, or on an edge.

Targets are said to be uncertain in some of them and sure in others (LANTERN, section 3; ADT-Tree, section III-B and
figure 9), and trees to go deeper in some than in others (ADT-Tree, figure 2).
Letters: I pictures, S side in pixels, G cells along a side, n = G^2 cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...measured_rows import Row
from ...summary import summarize
from ...tables import Column, Table, Value, text
from .drawn_cells import CellStatistics

PLACES = ("flat", "texture", "edge")
# Root mean square over the channels of the deviation of a cell's pixels, of 0 to 255: below the first a cell is flat,
# from the second on it is an edge. A step of 70 through the middle of a cell has 35.
LIMITS = (6.0, 35.0)
# A picture with this share of flat cells, or more, and of textured ones too, has flat and textured regions.
REGION = 0.2


def contrasts(pictures: Tensor, grid: int) -> Tensor:
    """uint8 [I,3,S,S] -> [I,n] float32: how much the pixels of each cell differ, 0 to 128."""
    side = pictures.shape[-1] // grid
    cells = pictures.float().unfold(2, side, side).unfold(3, side, side)  # [I,3,G,G,s,s]
    return cells.var((-2, -1), correction=0).mean(1).sqrt().flatten(1)


def kinds_of(contrast: Tensor) -> Tensor:
    """[I,n] -> [I,n] int64, numbers of `PLACES`."""
    return torch.bucketize(contrast, torch.tensor(LIMITS), right=True)


def mixed(contrast: Tensor) -> Tensor:
    """[I,n] -> [I] bool: pictures with a flat and a textured region."""
    kinds = kinds_of(contrast)
    return ((kinds == 0).float().mean(1) >= REGION) & ((kinds == 1).float().mean(1) >= REGION)


def by_place(statistics: CellStatistics, contrast: Tensor) -> dict[str, dict[str, float]]:
    """Place -> means over the cells of that kind; places that no picture has are left out.

    Args:
        contrast: [I,n] of the pictures that were read.
    """
    kinds = kinds_of(contrast)
    drafted, result = kinds[:, -statistics.exact.shape[1] :], {}
    for number, place in enumerate(PLACES):
        here, there = kinds == number, drafted == number
        if there.any():
            result[place] = {
                "share": float(here.float().mean()),
                "target_top1": float(statistics.top1[here].mean()),
                "target_top10": float(statistics.top10[here].mean()),
                "head_top1": float((statistics.rank_best[there] == 1).float().mean()),
                "first_draft_exact": float(statistics.exact[there].mean()),
                "first_draft_lantern": float(statistics.accept[:, -1, -1][there].mean()),
            }
    return result


def places_table(by_temperature: Mapping[float, Mapping[str, Mapping[str, float]]], widest: str) -> Table:
    """A line for each temperature and place."""
    names = ("share", "target_top1", "target_top10", "head_top1", "first_draft_exact", "first_draft_lantern")
    heads = ("share of cells", "target top-1", "target top-10", "head top-1", "first draft's chance, exact",
             f"first draft's chance, LANTERN {widest}")  # fmt: skip
    rows: tuple[tuple[Value, ...], ...] = tuple(
        (temperature, place, *(values[name] for name in names))
        for temperature, places in by_temperature.items()
        for place, values in places.items()
    )
    note = (f"The standard deviation of a cell's pixels (0 to 255) decides: flat below {LIMITS[0]:g}, edge from "
            f"{LIMITS[1]:g} on, texture between. At temperature 0 the probabilities are those at "
            "temperature 1.")  # fmt: skip
    columns = (Column("T", "g"), text("place"), *(Column(head, ".1%") for head in heads))
    title = "How sure the target is in flat, textured and edge cells"
    return Table(title, columns, rows, source="ADT-Tree, section III-B", note=note)


def mixed_table(rows: Sequence[Row], contrast: Mapping[float, Mapping[str, Tensor]]) -> Table | None:
    """tau of each method on pictures with a flat and a textured region; None where there are none.

    Args:
        rows: each method's at a temperature in the order of its pictures.
        contrast: temperature -> drafting method -> [I,n].
    """
    lines: list[tuple[Value, ...]] = []
    for temperature, by_method in contrast.items():
        for method, values in by_method.items():
            mine = [row for row in rows if (row.temperature, row.method) == (temperature, method)]
            chosen = [row for row, is_mixed in zip(mine, mixed(values).tolist(), strict=True) if is_mixed]
            if chosen:
                s = summarize(chosen)
                lines.append((temperature, method, len(chosen), (s.tau, *s.tau_interval), s.kept_depth, s.mean_nodes))
    if not lines:
        return None
    columns = (Column("T", "g"), text("method"), Column("pictures", "d"), Column("tau [95%]", kind="interval"),
               Column("kept depth"), Column("nodes", ".0f"))  # fmt: skip
    note = f"Pictures with at least {REGION:.0%} flat and {REGION:.0%} textured cells."
    return Table("Pictures with a flat and a textured region", columns, tuple(lines), note=note)
