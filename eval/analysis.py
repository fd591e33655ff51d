"""What target and EAGLE head give each cell of finished pictures, and where decoding stood when it drew them.

It shows why drafts of pictures are rejected (LANTERN, section 3; ADT-Tree, section III-B), what relaxed acceptance
gains (LANTERN, tables 1, 3 and 9, appendix G), and where in a picture trees go deep (ADT-Tree, figure 2).
Letters: G cells along a side, n = G^2 cells, M = n - 1 cells that are drafted (the prefill gives the first),
I pictures, R rows, K and E settings of k and delta, V vocabulary, D width.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..core.errors import UserError
from ..core.nouns import CodeBatch
from ..core.section import Section
from ..data.codes import ShardData, ShardSample, ShardSamples
from ..models.decoding.neighbours import NeighbourTable, load_neighbours
from ..models.decoding.warp import Warp
from ..models.drafters.eagle import EagleHead
from ..models.targets.base import TargetSequence
from .lantern import Lantern, LanternConfig
from .measure import Row, bootstrap, paired_difference, quartiles

AT_ONCE = 256  # cells whose scores are held in full before they are warped
CYCLE_NODES = 59  # drafts that a cycle of the papers' trees verifies: what the rule is timed on


Bound = Annotated[float, Field(ge=0, le=1)]


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
    # The head's training data, as its own stage has it: accuracy on what it saw and on its held-out share. null: not.
    head_data: ShardData | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """`true` stands for the defaults."""
        return {} if given is True else given

    def check(self, num_codes: int) -> None:
        """Raises `UserError` before any picture is drawn."""
        if max(self.k) > num_codes:
            raise UserError(
                f"analysis: k is {max(self.k)}, in a codebook of {num_codes}", cure="give k of at most that many"
            )

    def table(self, codebook: Tensor, *, offset: int = 0, folder: Path | None = None) -> NeighbourTable:
        """One table serves every k: the nearest codes (L2) of each row of `codebook` [C,d]."""
        self.check(len(codebook))
        return load_neighbours(codebook, max(self.k) - 1, metric="l2", offset=offset, folder=folder)


# ---- distributions of a finished picture


@dataclass(frozen=True)
class Curves:
    """Guided and warped distributions at the cells of one picture. At temperature 0 they are those at temperature 1."""

    p: Tensor  # [n,V] float32, the target's
    q: Tensor  # [M,V] float32, the head's for the cells from the second on, from true features
    tokens: Tensor  # [n] int64, what was drawn

    @property
    def drafted(self) -> Tensor:
        """[M,V] the target's where the head has one too."""
        return self.p[1:]


@torch.no_grad()
def teacher_forced(target: Any, head: EagleHead, condition: Tensor, codes: Tensor, warp: Warp) -> Curves:
    """What decoding sees, had it drawn this picture: p before each token, q at the root of a cycle that starts there.

    Args:
        target: with `sequence`, `guided`, `guidance` and `device`.
        condition: an `ImageRequest`'s.
        codes: [n] int64, of the image tokenizer.
    """
    rows, count = target.guidance.num_rows, len(codes)
    batch = CodeBatch(
        codes=codes.expand(rows, -1),
        conditions=(condition,) * rows,
        uncond=torch.arange(rows) == 1,
        real=torch.ones(rows, dtype=torch.bool),
        sample_ids=("",) * rows,
        supervised_per_row=0,
    ).to(target.device)
    sequence = target.sequence(batch, batch.uncond)
    last = sequence.ids.shape[1] - count - 1  # the prompt's last place, whose feature scores the first code
    p = _distributions(target, sequence.feature[:, last:-1], 0, warp)
    q = _distributions(target, _predicted(head, sequence)[:, last:], 1, warp)
    return Curves(p, q, sequence.ids[0, last + 1 :])


def _predicted(head: EagleHead, sequence: TargetSequence) -> Tensor:
    """[R,T-2,D] features of the places from the second on, but for the last, which nothing follows."""
    features, length = sequence.feature[:, :-2], sequence.ids.shape[1] - 2
    mask = torch.ones(length, length, dtype=torch.bool, device=features.device).tril()
    if head.shape.mask_padding:
        # Padding sees itself, so that no row of the attention is empty.
        eye = torch.eye(length, dtype=torch.bool, device=features.device)
        mask = (mask & sequence.mask[:, None, :-2]) | eye
    dtype = head.fc.weight.dtype
    predicted = head(features.to(dtype), sequence.ids[:, 1:-1], sequence.positions[:, :-2], mask)
    return predicted.to(features.dtype)


def _distributions(target: Any, feature: Tensor, first: int, warp: Warp) -> Tensor:
    """[R,N,D] -> [N,V]; the first of them scores image token number `first`."""
    found = []
    for start in range(0, feature.shape[1], AT_ONCE):
        part = feature[:, start : start + AT_ONCE]
        found.append(warp(target.guided(part, [first + start + place for place in range(part.shape[1])])))
    return torch.cat(found)


# ---- numbers from p and q


def ranks(q: Tensor, tokens: Tensor) -> Tensor:
    """Place of each of `tokens` [N] in the order of q [N,V], from 1; V where q gives it nothing (never drafted)."""
    own = q.gather(-1, tokens[:, None])
    return ((q > own).sum(-1) + 1).where(own[:, 0] > 0, q.shape[-1])


def top_mass(p: Tensor, k: int) -> Tensor:
    """[N] probability of the k most likely tokens."""
    return p.topk(min(k, p.shape[-1]), dim=-1).values.sum(-1)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """[N] sum of min(p, q): how likely exact speculative sampling accepts one draft from q."""
    return torch.minimum(p, q).sum(-1)


def entropy(p: Tensor) -> Tensor:
    """[N] in nats; its exponential counts the tokens that a uniform choice would be among."""
    return torch.special.entr(p).sum(-1)


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
    found = relaxed(config, table, p, drafts)
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
        config.divergence, config.delta, float(found.accept.mean()), float(found.size.float().mean()),
        statistics.median(times[1:]),
    )  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- many pictures

Asked = tuple[Tensor, Tensor]  # a picture's condition and its codes [n]


def encoded_pictures(
    config: AnalysisConfig, folder: Path, condition: Callable[[ShardSample], Tensor]
) -> dict[str, list[Asked]]:
    """Pictures of the head's data in `folder`: those it was trained on, and those held out, where there are any.

    Args:
        condition: `generators.sample_condition` of the target.
    """
    assert config.head_data is not None
    found = {}
    for name, held_out in (("training pictures", False), ("held-out pictures", True)):
        samples = ShardSamples(folder, config.head_data, held_out=held_out)
        chosen = [samples[number] for number in range(min(config.pictures, len(samples)))]
        if chosen:
            found[name] = [(condition(sample), sample.tensors["codes"].long()) for sample in chosen]
    return found


@dataclass(frozen=True)
class Reading:
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

    def summary(self) -> dict[str, Any]:
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
    target: Any,
    head: EagleHead,
    pictures: Sequence[Asked],
    warp: Warp,
    table: NeighbourTable,
    *,
    seed: int,
) -> Reading:
    """Reads up to `config.pictures` of `pictures` (condition, codes [n]).

    Args:
        table: `config.table` of the codebook, on the target's device.
        seed: of the sampled first drafts.
    """
    assert pictures, "at least one picture"
    generator = torch.Generator(target.device).manual_seed(seed)
    found: dict[str, list[Tensor]] = {}
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
            found.setdefault(name, []).append(values.cpu())
    assert first is not None
    stacked = {name: torch.stack(values) for name, values in found.items()}
    return Reading(grid=target.grid, first=first, bounds=bounds, **stacked)


def _cells(
    config: AnalysisConfig, curves: Curves, drafts: Tensor, table: NeighbourTable, *, sampled: bool
) -> dict[str, Tensor]:
    """The fields of a `Reading` for one picture."""
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


# ---- where decoding stood, from the rows of a report


def accepted_histogram(rows: Sequence[Row]) -> list[float]:
    """Share of cycles whose acceptance length was 1, 2, ...: accepted drafts and the bonus token, as tau counts."""
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
        values: one of each cycle: acceptance lengths, levels drafted ("drafted"), d or k of the adaptation.
    """
    counts = torch.tensor([count + 1 for count in accepted])
    spread = torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)
    return _square(torch.cat([spread.new_full((1,), float("nan")), spread]), grid)


def length_map(accepted: Sequence[int], grid: int) -> Tensor:
    """[G,G] float32, the acceptance length (bonus token included) of the cycle that emitted each cell."""
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
