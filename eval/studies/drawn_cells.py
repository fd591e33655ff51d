"""What target and EAGLE head give each cell of finished pictures: why drafts of pictures are rejected, and what relaxed
acceptance gains (LANTERN, section 3, tables 1, 3 and 9, appendix G; ADT-Tree, section III-B).

Letters: I pictures, n cells, M = n - 1 cells that are drafted (the prefill gives the first), N any number of cells,
K and E settings of k and delta, R rows, V vocabulary, D width.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...core.batch import CodeBatch
from ...core.errors import UserError
from ...core.json_types import Json, JsonObject
from ...core.section import Section
from ...core.states import Taps, TargetStates
from ...data.shards.codes import ShardData, ShardSample, ShardSamples
from ...models.decoding.neighbours import NeighbourTable, load_neighbours
from ...models.decoding.warp import Warp
from ...models.drafters.eagle_images import ImageEagleHead, causal_mask
from ...models.targets.guided import GuidedTarget
from ..lantern import Lantern, LanternConfig, Proximity

AT_ONCE = 256  # cells whose scores are held in full before they are warped
CYCLE_NODES = 59  # drafts that a cycle of the papers' trees verifies: what bounds are timed on
# (TVD, JSD) bounds that accept about as much as one another (LANTERN, table 3), compared at the largest k.
EQUAL_BOUNDS = ((0.2, 0.13), (0.3, 0.2))
ConditionAndCodes = tuple[Tensor, Tensor]  # a picture's condition and its codes [n]


class AnalysisConfig(Section):
    """What is read from pictures that the target drew plainly; costs one pass of target and head for each."""

    # LANTERN's figure 2c reads 1000, its figure 7 and ADT-Tree's figure 3 read 100.
    pictures: int = Field(100, ge=1)
    # LANTERN's grid (table 1) is for 16384 codes: a small codebook wants small k.
    k: list[Annotated[int, Field(ge=1)]] = Field([100, 300, 1000], min_length=1)
    delta: list[Annotated[float, Field(ge=0, le=1)]] = Field([0.05, 0.1, 0.2, 0.4], min_length=1, max_length=5)
    # The head's training data, as its own stage has it: accuracy on what it saw and on its held-out share. null: not.
    head_data: ShardData | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, value: object) -> Json:
        """`true` stands for the defaults."""
        return {} if value is True else value

    def check(self, num_codes: int) -> None:
        """Raises `UserError` for a k beyond the codebook, before any picture is drawn."""
        if max(self.k) > num_codes:
            raise UserError(
                f"analysis: k is {max(self.k)}, in a codebook of {num_codes}", hint="give k of at most that many"
            )

    def table(self, codebook: Tensor, *, offset: int = 0, folder: Path | None = None) -> NeighbourTable:
        """One table serves every k: the nearest codes (L2) of each row of `codebook` [C,d]."""
        self.check(len(codebook))
        return load_neighbours(codebook, max(self.k) - 1, metric="l2", offset=offset, folder=folder)


# ---- one picture


@dataclass(frozen=True)
class Curves:
    """Guided and warped distributions at the cells of one picture. At temperature 0 they are those at temperature 1."""

    p: Tensor  # [n,V] float32, the target's
    q: Tensor  # [M,V] float32, the head's for the cells from the second on, from true features
    tokens: Tensor  # [n] int64, what was drawn


@torch.no_grad()
def teacher_forced(target: GuidedTarget, head: ImageEagleHead, condition: Tensor, codes: Tensor, warp: Warp) -> Curves:
    """What decoding sees, had it drawn this picture: p before each token, q at the root of a cycle that starts there.

    Args:
        target: with `states`, `guided`, `guidance` and `device`.
        condition: an `ImageRequest`'s.
        codes: [n] int64, of the image tokenizer.
    """
    sequence, last = _sequence(target, condition, codes)
    assert sequence.feature is not None and sequence.ids is not None
    p = _distributions(target, sequence.feature[:, last:-1], 0, warp)
    # Features of the places from the second on, but for the last, which nothing follows.
    assert sequence.mask is not None and sequence.positions is not None
    features, mask = sequence.feature[:, :-2], causal_mask(head, sequence.mask[:, :-2])
    predicted = head.predict(features.to(head.dtype), sequence.ids[:, 1:-1], sequence.positions[0, :, :-2], mask)
    q = _distributions(target, predicted.to(features.dtype)[:, last:], 1, warp)
    return Curves(p, q, sequence.ids[0, last + 1 :])


def _sequence(target: GuidedTarget, condition: Tensor, codes: Tensor) -> tuple[TargetStates, int]:
    """States of one picture's rows, and the prompt's last place, whose feature scores the first code."""
    rows, count = target.guidance.num_rows, len(codes)
    batch = CodeBatch(
        codes=codes.expand(rows, -1),
        conditions=(condition,) * rows,
        uncond=torch.arange(rows) == 1,
        real=torch.ones(rows, dtype=torch.bool),
        sample_ids=("",) * rows,
        supervised_per_row=0,
    ).to(target.device)
    sequence = target.states(batch, Taps(feature=True))
    assert sequence.ids is not None
    return sequence, sequence.ids.shape[1] - count - 1


@torch.no_grad()
def drawn_by(target: GuidedTarget, condition: Tensor, codes: Tensor, warp: Warp) -> tuple[Tensor, Tensor]:
    """p [n,V] before each code, as of `teacher_forced`, and the tokens [n]."""
    sequence, last = _sequence(target, condition, codes)
    assert sequence.feature is not None and sequence.ids is not None
    return _distributions(target, sequence.feature[:, last:-1], 0, warp), sequence.ids[0, last + 1 :]


def _distributions(target: GuidedTarget, feature: Tensor, first: int, warp: Warp) -> Tensor:
    """[R,N,D] -> [N,V]; the first of them scores image token number `first`."""
    probs = []
    for start in range(0, feature.shape[1], AT_ONCE):
        part = feature[:, start : start + AT_ONCE]
        probs.append(warp(target.guided(part, [first + start + place for place in range(part.shape[1])])))
    return torch.cat(probs)


def ranks(q: Tensor, tokens: Tensor) -> Tensor:
    """Place of each of `tokens` [N] in the order of q [N,V], from 1; V where q gives it nothing (never drafted)."""
    mass = q.gather(-1, tokens[:, None])
    return ((q > mass).sum(-1) + 1).where(mass[:, 0] > 0, q.shape[-1])


def top_mass(p: Tensor, k: int) -> Tensor:
    """[N] probability of the k most likely tokens."""
    return p.topk(min(k, p.shape[-1]), dim=-1).values.sum(-1)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """[N] sum of min(p, q): how likely exact speculative sampling accepts one draft from q."""
    return torch.minimum(p, q).sum(-1)


# ---- LANTERN's rule on one draft a cell


def lantern(k: int, delta: float, divergence: str = "tvd") -> LanternConfig:
    """The rule by the paper's bound."""
    return LanternConfig.model_validate({"kind": "lantern", "k": k, "delta": delta, "divergence": divergence})


def relaxed(config: LanternConfig, table: NeighbourTable, p: Tensor, drafts: Tensor) -> Proximity:
    """Acceptance and |A| of `drafts` [N], the first of their cycles, chosen by the head, under p [N,V]."""
    rows = torch.arange(len(drafts), device=p.device)
    return Lantern(config, table, greedy=False).proximity(p, rows, drafts)


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
    wait = partial(torch.cuda.synchronize, p.device) if p.device.type == "cuda" else lambda: None
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        rule.proximity(p, rows, drafts[rows])
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    assert config.delta is not None
    accept, size = float(outcome.mass.mean()), float(outcome.size.float().mean())
    return BoundCost(config.divergence, config.delta, accept, size, statistics.median(times[1:]))


# ---- many pictures


def encoded_pictures(
    config: AnalysisConfig, folder: Path, condition: Callable[[ShardSample], Tensor]
) -> dict[str, list[ConditionAndCodes]]:
    """Pictures of the head's data in `folder`: those it was trained on, and those held out, where there are any."""
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

    top1: Tensor  # [I,n] probability of the target's most likely token
    top10: Tensor  # [I,n] of its ten most likely
    rank_best: Tensor  # [I,M] where the head ranks the target's most likely token
    rank_drawn: Tensor  # [I,M] where it ranks the one that was drawn
    overlap: Tensor  # [I,M]
    exact: Tensor  # [I,M] acceptance of the first draft, the head's most likely token, by the exact rule
    accept: Tensor  # [I,K,E,M] by LANTERN
    size: Tensor  # [I,K,E,M] |A|
    bounds: tuple[BoundCost, ...]
    first: Curves

    def means(self, here: Tensor) -> JsonObject:
        """Means over the cells where `here` [I,n] is true; settings are the config's, in its order."""
        drafted = here[:, -self.exact.shape[1] :]
        rank = self.rank_best[drafted]
        return {
            "share": float(here.float().mean()),
            # Cells where the target's most likely token is among the head's k most likely.
            "head_top1": float((rank <= 1).float().mean()),
            "head_top3": float((rank <= 3).float().mean()),
            "target_top1": float(self.top1[here].mean()),
            "target_top10": float(self.top10[here].mean()),
            "expected_acceptance": float(self.overlap[drafted].mean()),
            "first_draft_exact": float(self.exact[drafted].mean()),
            "first_draft_lantern": self.accept.movedim(0, 2)[:, :, drafted].mean(-1).tolist(),
            "set_size": self.size.float().movedim(0, 2)[:, :, drafted].mean(-1).tolist(),
        }

    def summary(self) -> JsonObject:
        """Means over all cells, and what bounds cost, for the report."""
        means = self.means(torch.ones_like(self.top1, dtype=torch.bool))
        return {"pictures": len(self.top1)} | means | {"bounds": [bound._asdict() for bound in self.bounds]}

    def arrays(self) -> dict[str, Tensor]:
        """What the papers' figures are drawn from: numbers of each cell, |A| as means over the pictures, and both
        distributions at the flattest and the sharpest cell of the first picture (q of the first cell is 0).
        """
        cells = torch.stack([self.top1[0].argmin(), self.top1[0].argmax()])
        q = torch.cat([torch.zeros_like(self.first.q[:1]), self.first.q])
        return {
            "top1": self.top1, "rank_drawn": self.rank_drawn, "size": self.size.float().mean(0),
            "cells": cells, "p": self.first.p[cells], "q": q[cells],
        }  # fmt: skip


def read_pictures(
    config: AnalysisConfig,
    target: GuidedTarget,
    head: ImageEagleHead,
    pictures: Sequence[ConditionAndCodes],
    warp: Warp,
    table: NeighbourTable,
) -> CellStatistics:
    """Reads up to `config.pictures` of `pictures` (condition, codes [n]).

    Args:
        table: `config.table` of the codebook, on the target's device.
    """
    assert pictures, "at least one picture"
    tensors: dict[str, list[Tensor]] = {}
    first: Curves | None = None
    bounds: tuple[BoundCost, ...] = ()
    for condition, codes in pictures[: config.pictures]:
        curves = teacher_forced(target, head, condition, codes, warp)
        p, q, drafts = curves.p[1:], curves.q, curves.q.argmax(-1)
        if first is None:
            first = Curves(curves.p.cpu(), curves.q.cpu(), curves.tokens.cpu())
            pairs = [(name, d) for pair in EQUAL_BOUNDS for name, d in zip(("tvd", "jsd"), pair, strict=True)]
            bounds = tuple(bound_cost(lantern(max(config.k), d, name), table, p, drafts) for name, d in pairs)
        grid = [[relaxed(lantern(k, delta), table, p, drafts) for delta in config.delta] for k in config.k]
        cells = {
            "top1": top_mass(curves.p, 1),
            "top10": top_mass(curves.p, 10),
            "rank_best": ranks(q, p.argmax(-1)),
            "rank_drawn": ranks(q, curves.tokens[1:]),
            "overlap": overlap(p, q),
            "exact": p.gather(-1, drafts[:, None])[:, 0],
            "accept": torch.stack([torch.stack([proximity.mass for proximity in row]) for row in grid]),
            "size": torch.stack([torch.stack([proximity.size for proximity in row]) for row in grid]),
        }
        for name, values in cells.items():
            tensors.setdefault(name, []).append(values.cpu())
    assert first is not None
    return CellStatistics(first=first, bounds=bounds, **{name: torch.stack(of) for name, of in tensors.items()})
