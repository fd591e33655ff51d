"""TABED: several drafting modes of one draft at once, mixed into one distribution (TABED, section 5).

The modes are rows of one batch: a draft step is one forward, whatever their number, and each row commits the same
tokens after its own prompt. What is drawn from, and what sampling is verified against, is the mixture.
Letters: R rows, F nodes, P positions, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...core.batch import Request
from ...core.errors import Refused, did_you_mean
from ...core.fields import shorthand
from ...core.section import Section
from ..decoding.decoder import CachedDecoder
from ..decoding.rows import Places, stacked
from ..decoding.warp import Warp
from ..targets.base import TargetStep, Verified
from .independent import IndependentProposal
from .modes import MODES, ImageSubstitutes, Mode, View
from .weights import (
    FixedWeights,
    GridWeights,
    InverseWeights,
    Weights,
    WeightsConfig,
    check_weights,
    grid,
    grid_scores,
    mixture,
    reached,
)


class EnsembleConfig(Section):
    """Drafting modes and how much each counts. One member is that mode itself."""

    # What tables call it.
    name: str
    # M, T, C, P, T-text or T-raw: what the draft is shown in each.
    members: tuple[Mode, ...] = Field(min_length=1)
    # How much each member counts.
    weights: WeightsConfig = FixedWeights(kind="fixed")

    @model_validator(mode="after")
    def _fits(self) -> EnsembleConfig:
        check_weights(self.weights, len(self.members))
        if (known := _named(self.name)) is not None:
            members, adapts = known
            values = self.weights.values or () if isinstance(self.weights, FixedWeights) else None
            if self.members != members or (values is None) is not adapts or len({*(values or ())}) > 1:
                how = "by weights that adapt" if adapts else "equally"
                raise ValueError(f"{self.name} is the mode that mixes {', '.join(members)} {how}: give another name")
        return self


def _named(name: str) -> tuple[tuple[Mode, ...], bool] | None:
    """The members of the mode that a name stands for, and whether their weights adapt; None: it stands for nothing."""
    if name in MODES:
        return (name,), False
    match = re.fullmatch(r"([MTCP]{2,4})(\*?)", name)
    if match is None or len({*match[1]}) < len(match[1]):
        return None
    members: Any = tuple(match[1])
    return members, bool(match[2])


def preset(name: str) -> EnsembleConfig:
    """Convert a name to members: a mode, or several modes (MT, MTCP: equal weights; MT*, MTCP*: TABED's adaptive
    weights, the grid for two members and the inverse error for more). Raises `ValueError` for a name that stands for
    nothing.
    """
    if (known := _named(name)) is None:
        raise Refused("", f"no drafting mode {name!r}", did_you_mean(name, [*MODES, "MT", "MT*", "MTCP", "MTCP*"]))
    members, adapts = known
    weights: Any = FixedWeights(kind="fixed")
    if adapts:
        weights = GridWeights(kind="grid") if len(members) == 2 else InverseWeights(kind="inverse")
    return EnsembleConfig(name=name, members=members, weights=weights)


# An entry of a recipe's list of modes: a name, or an ensemble spelt out.
DraftingMode = Annotated[EnsembleConfig, shorthand(str, preset)]


@dataclass
class WeightTrace:
    """The weights of one request over time, and what each weight between two members would have drafted. A step is a
    token of the output, counted from 0 (the target's first); steps whose token no draft proposed (the bonus token of a
    cycle that was accepted whole) are left out.
    """

    members: tuple[str, ...]
    pair: tuple[int, int]  # the members that `line` moves between
    line: list[float]  # weights of the first of the pair
    cycles: list[list[float]] = field(default_factory=list)  # the members' weights in each cycle
    steps: list[int] = field(default_factory=list)
    cycle_of_step: list[int] = field(default_factory=list)
    accepted: list[list[bool]] = field(default_factory=list)  # for each step: whether the target takes the token


class EnsembleProposal(IndependentProposal):
    """Proposes the mixture of several modes by `weights`, and with `record` keeps a `WeightTrace` of each request in
    `trace`, which costs a synchronisation in each cycle.
    """

    def __init__(
        self, decoder: CachedDecoder, members: Sequence[Mode], weights: Weights, *, newline_id: int,
        substitutes: ImageSubstitutes | None = None, record: bool = False,
    ):  # fmt: skip
        super().__init__(decoder, members[0], newline_id=newline_id, substitutes=substitutes)
        for mode in members:
            self.substitutes.check(mode)
        self.members, self.weights, self.record = tuple(members), weights, record
        self.trace: WeightTrace | None = None
        self._drafted: list[Tensor] = []  # [R,F,V] of the root and of each expansion

    @torch.inference_mode()
    def start(self, request: Request, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        super().start(request, prefill, warp, capacity=capacity)
        self.weights.start(self.decoder.device)
        self._emitted, self._drafted = 1, []  # tokens of the output so far
        self.trace = None
        if self.record:
            pair = (self.members.index("M"), self.members.index("T")) if {"M", "T"} <= {*self.members} else (0, 1)
            assert len(self.members) > 1, "one member has no weights to record"
            line = grid(2, 10)
            self._line = torch.tensor(line, device=self.decoder.device)
            self.trace = WeightTrace(self.members, pair, [first for first, _ in line])

    def _views_of(self, request: Request) -> tuple[View, ...]:
        # A mode that is listed twice is computed once, because captions cost a pass of a model.
        views = {mode: self.substitutes.view(request, mode) for mode in dict.fromkeys(self.members)}
        return tuple(views[mode] for mode in self.members)

    def _prefill(self, views: Sequence[View], capacity: int) -> None:
        """Run each row's prompt alone: padding all to the longest would cost most of the prefill. M and P look once."""
        shown = ((view.request.pixels, view.request.pictures) for view in views)
        encoded = next((self.decoder.see(pixels, pictures) for pixels, pictures in shown if pixels is not None), None)
        caches = [self.decoder.new_cache(len(view.request.ids)) for view in views]
        rope_deltas = [self._run_prompt(view, cache, encoded) for view, cache in zip(views, caches, strict=True)]
        lengths = tuple(cache.length for cache in caches)
        self._cache = stacked(caches, max(lengths) + capacity)
        self._places = Places(lengths, max(lengths) + capacity, self.decoder.device, rope_deltas)

    def root(self) -> Tensor:
        self._drafted = []
        return super().root()

    def _q(self, feature: Tensor) -> Tensor:
        q = self._warp.apply_temperature(self.decoder.logits(feature))
        if self.weights.adaptive or self.record:
            self._drafted.append(q)
        return mixture(self.weights.current, q)

    @torch.inference_mode()
    def accept(self, verified: Verified) -> None:
        """Update the weights by the cycle's p and q, then commit the path."""
        self._observe(verified)
        self._emitted += len(verified.tokens) + 1
        super().accept(verified)

    def _observe(self, verified: Verified) -> None:
        """The bonus position of a path that was accepted whole is no part of the weights, as in TABED's code."""
        step, expansions = verified.step, reached(verified)
        assert step is not None
        if expansions and (self.weights.adaptive or self.record):
            p = self._warp.apply_temperature(step.logits[: len(expansions)])
            # [R,P,V]: columns of the parts [R,F,V] side by side, which are never joined whole.
            columns = [(part, column) for part in self._drafted for column in range(part.shape[1])]
            q = torch.stack([columns[number][0][:, columns[number][1]] for number in expansions], dim=1)
            if self.trace is not None:
                self._note(self.trace, p, q)
            self.weights.observe(p, q)

    def _note(self, trace: WeightTrace, p: Tensor, q: Tensor) -> None:
        """Greedy acceptance, whatever the temperature: the likeliest token of the mixture is the target's."""
        hits, _ = grid_scores(self._line, p, q[list(trace.pair)], hits=True, divergence=None)
        assert hits is not None
        trace.accepted += hits.tolist()
        trace.steps += range(self._emitted, self._emitted + len(p))
        trace.cycle_of_step += [len(trace.cycles)] * len(p)
        trace.cycles.append(self.weights.current.tolist())
