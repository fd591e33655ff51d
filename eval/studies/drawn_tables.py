"""Tables of drawn pictures: how well the head knows the target, what relaxing gains, and kinds of cells.

A cell is flat, textured or on an edge, by its pixels. Targets are said to be uncertain in some of them and sure in
others (LANTERN, section 3; ADT-Tree, section III-B and figure 9). Letters: I pictures, S side in pixels, G cells along
a side, n = G^2 cells.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...core.json_types import JsonObject
from ..tables import Column, ReportSection, Table, Value, text
from .drawn_cells import AnalysisConfig, CellStatistics

PLACES = ("flat", "texture", "edge")
# Root mean square over the channels of the deviation of a cell's pixels, of 0 to 255: below the first a cell is flat,
# from the second on it is an edge. A step of 70 through the middle of a cell has 35.
LIMITS = (6.0, 35.0)
COLD = "At temperature 0 the probabilities are those at temperature 1."


def drawn_section(
    config: AnalysisConfig,
    by_temperature: Mapping[float, CellStatistics],
    *,
    encoded: Mapping[str, CellStatistics],
    contrast: Mapping[float, Tensor],
) -> ReportSection:
    """What is said of pictures that were drawn plainly; its data has the same numbers by temperature.

    Args:
        encoded: "training pictures", "held-out pictures" -> what was read from the head's own data.
        contrast: by temperature: `contrasts` [I,n] of the pictures that were read.
    """
    places = {t: by_place(s, contrast[t]) for t, s in by_temperature.items()}
    widest, chance = f"LANTERN k={config.k[-1]}, delta={config.delta[-1]:g}", "first draft's chance"
    names = ("head top-1", "head top-3", "target top-1", "target top-10", "sum min(p, q)", f"{chance}, exact",
             f"{chance}, {widest}")  # fmt: skip
    lines: list[tuple[Value, ...]] = []
    for name, statistics in {**encoded, **{f"drawn, T = {t:g}": s for t, s in by_temperature.items()}}.items():
        s = statistics.summary()
        keys = ("pictures", "head_top1", "head_top3", "target_top1", "target_top10", "expected_acceptance",
                "first_draft_exact")  # fmt: skip
        lines.append((name, *(s[key] for key in keys), s["first_draft_lantern"][-1][-1]))
    note = (f"Drawn pictures are plain decoding's; the head reads the target's features. {COLD} A first draft's chance "
            "is the probability that the rule accepts the head's first draft of a cell, whether or not a cycle starts "
            "there.")  # fmt: skip
    columns = (text("pictures"), Column("n", "d"), *(Column(name, ".1%") for name in names))
    content = [Table("How well the head predicts the target", columns, tuple(lines),
                     "LANTERN, figures 2b and 2c; ADT-Tree, figure 1", note)]  # fmt: skip
    lines = [
        (temperature, name, *values)
        for temperature, s in by_temperature.items()
        for name, values in (
            ("exact", [float(s.exact.mean())] * len(config.delta)),
            *zip((f"k = {k}" for k in config.k), s.accept.mean((0, 3)).tolist(), strict=True),
        )
    ]
    columns = (Column("T", "g"), text("rule"), *(Column(f"delta = {delta:g}", ".4f") for delta in config.delta))
    content.append(Table("First draft's chance under LANTERN", columns, tuple(lines), "LANTERN, table 1"))
    # Bounds on TVD and JSD that accept about as much, and their cost.
    columns = (Column("T", "g"), text("divergence"), Column("delta", "g"), Column(chance, ".1%"),
               Column("size of A", ".1f"), Column("ms"))  # fmt: skip
    lines = [(t, *bound) for t, statistics in by_temperature.items() for bound in statistics.bounds]
    note = f"Bounds that LANTERN reports as equivalent, at k = {max(config.k)}; median ms for 59 drafts."
    content.append(Table("Bounds of LANTERN", columns, tuple(lines), "LANTERN, tables 3 and 9", note))
    content.append(places_table(places, widest))
    data = {f"{t:g}": s.summary() | {"places": places[t]} for t, s in by_temperature.items()}
    return ReportSection("Analysis of the pictures", tuple(content), "analysis", data)


# ---- kinds of cells


def contrasts(pictures: Tensor, grid: int) -> Tensor:
    """uint8 [I,3,S,S] -> [I,n] float32: how much the pixels of each cell differ, 0 to 128."""
    side = pictures.shape[-1] // grid
    cells = pictures.float().unfold(2, side, side).unfold(3, side, side)  # [I,3,G,G,s,s]
    return cells.var((-2, -1), correction=0).mean(1).sqrt().flatten(1)


def kinds_of(contrast: Tensor) -> Tensor:
    """[I,n] -> [I,n] int64, numbers of `PLACES`."""
    return torch.bucketize(contrast, torch.tensor(LIMITS), right=True)


def by_place(statistics: CellStatistics, contrast: Tensor) -> dict[str, JsonObject]:
    """Place -> means over the cells of that kind; places that no picture has are left out.

    Args:
        contrast: [I,n] of the pictures that were read.
    """
    kinds = kinds_of(contrast)
    places = [(place, kinds == number) for number, place in enumerate(PLACES)]
    return {place: statistics.means(here) for place, here in places if here[:, 1:].any()}


def places_table(by_temperature: Mapping[float, Mapping[str, JsonObject]], widest: str) -> Table:
    """A line for each temperature and place."""
    heads = ("share of cells", "target top-1", "target top-10", "head top-1", "first draft's chance, exact",
             f"first draft's chance, {widest}")  # fmt: skip
    keys = ("share", "target_top1", "target_top10", "head_top1", "first_draft_exact")
    lines = tuple((t, place, *(means[key] for key in keys), means["first_draft_lantern"][-1][-1])
                  for t, places in by_temperature.items() for place, means in places.items())  # fmt: skip
    note = (f"The standard deviation of a cell's pixels (0 to 255) decides: flat below {LIMITS[0]:g}, edge from "
            f"{LIMITS[1]:g} on, texture between. {COLD}")  # fmt: skip
    columns = (Column("T", "g"), text("place"), *(Column(head, ".1%") for head in heads))
    title = "How sure the target is in flat, textured and edge cells"
    return Table(title, columns, lines, source="ADT-Tree, section III-B", note=note)
