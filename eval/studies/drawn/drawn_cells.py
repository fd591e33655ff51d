"""Many finished pictures read, cell by cell: how well the head knows the target, and what relaxing would gain.

Letters: G cells along a side, n = G^2 cells, M = n - 1 cells that are drafted (the prefill gives the first),
I pictures, K and E settings of k and delta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ....core.errors import UserError
from ....core.json_types import Json, JsonObject
from ....core.section import Section
from ....data.shards.codes import ShardData, ShardSample, ShardSamples
from ....models.decoding.neighbours import NeighbourTable, load_neighbours
from ....models.decoding.warp import Warp
from ....models.drafters.eagle_images import ImageEagleHead
from ....models.targets.base import DrawingTarget
from ...lantern import LanternConfig
from .distributions import Curves, overlap, ranks, teacher_forced, top_mass
from .relaxation import BoundCost, bound_cost, relaxed

Bound = Annotated[float, Field(ge=0, le=1)]
Place = Annotated[int, Field(ge=1)]
ConditionAndCodes = tuple[Tensor, Tensor]  # a picture's condition and its codes [n]


class AnalysisConfig(Section):
    """What is read from pictures that the target drew plainly; costs one pass of target and head for each."""

    # LANTERN's figure 2c reads 1000, its figure 7 and ADT-Tree's figure 3 read 100.
    pictures: int = Field(100, ge=1)
    # LANTERN's grid (table 1) is for 16384 codes: a small codebook wants small k.
    k: list[Annotated[int, Field(ge=1)]] = Field([100, 300, 1000], min_length=1)
    delta: list[Bound] = Field([0.05, 0.1, 0.2, 0.4], min_length=1, max_length=5)
    # The first draft of a cycle: the head's most likely token (trees with draw: top-k), or one sampled from it.
    first_draft: Literal["best", "sampled"] = "best"
    # (TVD, JSD) bounds that accept about as much as one another (LANTERN, table 3), compared at the largest k.
    equal_bounds: tuple[tuple[Bound, Bound], ...] = ((0.2, 0.13), (0.3, 0.2))
    # (row, column), from 1: whose distributions in the first picture are shown (ADT-Tree, figure 5). null: the flattest
    # cell and the sharpest.
    cells: tuple[tuple[Place, Place], ...] | None = Field(None, min_length=1, max_length=3)
    # The head's training data, as its own stage has it: accuracy on what it saw and on its held-out share. null: not.
    head_data: ShardData | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, value: object) -> Json:
        """`true` stands for the defaults."""
        return {} if value is True else value

    def check(self, num_codes: int, grid: int | None = None) -> None:
        """Raises `UserError` before any picture is drawn. `grid`: codes along a side, where cells are asked for."""
        outside = [cell for cell in self.cells or () if grid is not None and max(cell) > grid]
        if outside:
            raise UserError(
                f"analysis: cell {outside[0]}, and pictures have {grid} rows and columns", hint="count them from 1"
            )
        if max(self.k) > num_codes:
            raise UserError(
                f"analysis: k is {max(self.k)}, in a codebook of {num_codes}", hint="give k of at most that many"
            )

    def cells_of(self, top1: Tensor, grid: int) -> list[int]:
        """Numbers in raster order of the cells to show, of a picture whose likeliest tokens have `top1` [n]."""
        if self.cells is None:
            return [int(top1.argmin()), int(top1.argmax())]
        return [(row - 1) * grid + column - 1 for row, column in self.cells]

    def table(self, codebook: Tensor, *, offset: int = 0, folder: Path | None = None) -> NeighbourTable:
        """One table serves every k: the nearest codes (L2) of each row of `codebook` [C,d]."""
        self.check(len(codebook))
        return load_neighbours(codebook, max(self.k) - 1, metric="l2", offset=offset, folder=folder)


def encoded_pictures(
    config: AnalysisConfig, folder: Path, condition: Callable[[ShardSample], Tensor]
) -> dict[str, list[ConditionAndCodes]]:
    """Pictures of the head's data in `folder`: those it was trained on, and those held out, where there are any.

    Args:
        condition: `generators.sample_condition` of the target.
    """
    assert config.head_data is not None
    pictures = {}
    for name, held_out in (("training pictures", False), ("held-out pictures", True)):
        samples = ShardSamples(folder, config.head_data, held_out=held_out)
        chosen = [samples[number] for number in range(min(config.pictures, len(samples)))]
        if chosen:
            pictures[name] = [(condition(sample), sample.tensors["codes"].long()) for sample in chosen]
    return pictures


@dataclass(frozen=True)
class CellStatistics:
    """Numbers of I pictures, cell by cell, on the CPU. `first` is kept whole, for the distributions of its cells."""

    grid: int
    top1: Tensor  # [I,n] the target's most likely token
    top10: Tensor  # [I,n] its ten most likely
    rank_best: Tensor  # [I,M] where the head ranks the target's most likely token
    rank_drawn: Tensor  # [I,M] where it ranks the one that was drawn
    overlap: Tensor  # [I,M]
    exact: Tensor  # [I,M] acceptance of the first draft by the exact rule
    accept: Tensor  # [I,K,E,M] by LANTERN
    size: Tensor  # [I,K,E,M] |A|
    bounds: tuple[BoundCost, ...]
    first: Curves

    def accuracy(self, k: int) -> float:
        """Share of cells where the target's most likely token is among the head's k most likely."""
        return float((self.rank_best <= k).float().mean())

    def summary(self) -> JsonObject:
        """Means over pictures and cells, for the report; settings are the config's, in its order."""
        return {
            "pictures": len(self.top1),
            "accuracy_top1": self.accuracy(1),
            "accuracy_top3": self.accuracy(3),
            "target_top1": float(self.top1.mean()),
            "target_top10": float(self.top10.mean()),
            "expected_acceptance": float(self.overlap.mean()),
            "first_draft_exact": float(self.exact.mean()),
            "first_draft_lantern": self.accept.mean((0, 3)).tolist(),
            "set_size": self.size.float().mean((0, 3)).tolist(),
            "bounds": [bound._asdict() for bound in self.bounds],
        }


def read_pictures(
    config: AnalysisConfig,
    target: DrawingTarget,
    head: ImageEagleHead,
    pictures: Sequence[ConditionAndCodes],
    warp: Warp,
    table: NeighbourTable,
    *,
    seed: int,
) -> CellStatistics:
    """Reads up to `config.pictures` of `pictures` (condition, codes [n]).

    Args:
        table: `config.table` of the codebook, on the target's device.
        seed: of the sampled first drafts.
    """
    assert pictures, "at least one picture"
    generator = torch.Generator(target.device).manual_seed(seed)
    tensors: dict[str, list[Tensor]] = {}
    first: Curves | None = None
    bounds: tuple[BoundCost, ...] = ()
    for condition, codes in pictures[: config.pictures]:
        curves = teacher_forced(target, head, condition, codes, warp)
        sampled = config.first_draft == "sampled"
        drafts = torch.multinomial(curves.q, 1, generator=generator)[:, 0] if sampled else curves.q.argmax(-1)
        if first is None:
            first = Curves(curves.p.cpu(), curves.q.cpu(), curves.tokens.cpu())
            bounds = _bounds(config, table, curves.drafted, drafts)
        for name, values in _cells(config, curves, drafts, table, sampled=sampled).items():
            tensors.setdefault(name, []).append(values.cpu())
    assert first is not None
    stacked = {name: torch.stack(values) for name, values in tensors.items()}
    return CellStatistics(grid=target.grid, first=first, bounds=bounds, **stacked)


def _cells(
    config: AnalysisConfig, curves: Curves, drafts: Tensor, table: NeighbourTable, *, sampled: bool
) -> dict[str, Tensor]:
    """The fields of a `CellStatistics` for one picture."""
    p, q = curves.drafted, curves.q
    grid = [[relaxed(_lantern(k, d), table, p, drafts, q if sampled else None) for d in config.delta] for k in config.k]
    exact = p.gather(-1, drafts[:, None])[:, 0]
    return {
        "top1": top_mass(curves.p, 1),
        "top10": top_mass(curves.p, 10),
        "rank_best": ranks(q, p.argmax(-1)),
        "rank_drawn": ranks(q, curves.tokens[1:]),
        "overlap": overlap(p, q),
        "exact": (exact / q.gather(-1, drafts[:, None])[:, 0]).clamp(max=1.0) if sampled else exact,
        "accept": torch.stack([torch.stack([r.accept for r in row]) for row in grid]),
        "size": torch.stack([torch.stack([r.size for r in row]) for row in grid]),
    }


def _bounds(config: AnalysisConfig, table: NeighbourTable, p: Tensor, drafts: Tensor) -> tuple[BoundCost, ...]:
    pairs = [(name, delta) for pair in config.equal_bounds for name, delta in zip(("tvd", "jsd"), pair, strict=True)]
    return tuple(bound_cost(_lantern(max(config.k), delta, name), table, p, drafts) for name, delta in pairs)


def _lantern(k: int, delta: float, divergence: str = "tvd") -> LanternConfig:
    return LanternConfig.model_validate({"kind": "lantern", "k": k, "delta": delta, "divergence": divergence})
