"""Weights of the members of an ensemble: fixed, or computed from how well each member predicted the tokens verified so
far.

After every cycle the target's distributions at the drafted positions are known (TABED, section 5). Each position is
scored once, for every weight of a grid or for every draft, and only sums of scores are kept, or the last `window`.
Letters: R drafts, P positions, V vocabulary, G weights of a grid, S scores.
"""

from __future__ import annotations

import functools
import itertools
from typing import Annotated, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from ...core.section import Section
from ..decoding.tree import ROOT
from ..targets.base import Verified

# The raw weight of a draft without error, as TABED's code has it; and what stands for the logarithm of less.
_FLAWLESS = 1e11
_TINY = torch.finfo(torch.float32).tiny
# Entries of the largest array while a grid is scored: 256 MiB.
_AT_ONCE = 1 << 26


class Weights(Protocol):
    """The weights of one request."""

    adaptive: bool
    current: Tensor  # [R] float32 on the device, of sum 1

    def start(self, device: torch.device) -> None:
        """Begin a request: equal weights (or the fixed ones), and no history."""
        ...

    def observe(self, p: Tensor, q: Tensor) -> None:
        """Receive p [P,V] and q [R,P,V], both after the temperature and before top-k and top-p, of a cycle's accepted
        positions and the first rejected one.
        """
        ...


def reached(verified: Verified) -> list[int]:
    """Which of a cycle's drafts, the root's and then each expansion's, had a say in what was accepted: those at the
    accepted positions and at the first rejected one, as far as tokens were drafted there.
    """
    tree, numbers = verified.tree, list[int]()
    assert tree is not None
    for depth, node in enumerate((ROOT, *verified.path)):
        if node not in tree.children:
            break
        # A product tree draws the children of nodes beside the likeliest chain from that chain's distribution at their
        # level, whose number is the depth.
        is_expanded = node != ROOT and tree.expansions[node] != ROOT
        numbers.append(tree.expansions[node] + 1 if is_expanded else depth)
    return numbers


class FixedWeights(Section):
    """The same in every cycle: MT, MTCP."""

    kind: Literal["fixed"]
    # One for each member, in any scale; null: equal.
    values: tuple[float, ...] | None = None


class GridWeights(Section):
    """MT*: the best of all weights that are multiples of 1 / parts, for any number of members."""

    kind: Literal["grid"]
    # 10: 11 weights for two members, 286 for four.
    parts: int = Field(10, ge=1, le=100)
    # hits-then-kl as released: the most positions whose likeliest token is the target's, then the smallest KL; the
    # article also has either alone.
    score: Literal["hits-then-kl", "hits", "kl", "tvd"] = "hits-then-kl"
    # Ties go to the first: released counts the first member's weight up from 0, the article down from 1.
    order: Literal["released", "article"] = "released"
    # Positions looked back on; null: all. TABED's table 3 finds no winner among 1, 4, 16 and all.
    window: int | None = Field(None, ge=1)


class InverseWeights(Section):
    """MTCP*: each draft by the inverse of its own error, which costs no search as members are added."""

    kind: Literal["inverse"]
    # kl: KL(p || q); tvd: the sum of |p - q|.
    error: Literal["kl", "tvd"] = "kl"
    # released: (1 / e)^(1 / temperature), normalised; softmax: softmax((1 / e) / temperature), as the article says.
    form: Literal["released", "softmax"] = "released"
    # Below 1 sharpens towards the best draft, 0 takes it alone.
    temperature: float = Field(1.0, ge=0)
    window: int | None = Field(None, ge=1)


WeightsConfig = Annotated[FixedWeights | GridWeights | InverseWeights, Field(discriminator="kind")]


def check_weights(settings: WeightsConfig, members: int) -> None:
    """Raise `ValueError` for weights that are not of so many members."""
    values = settings.values if isinstance(settings, FixedWeights) else None
    if values is not None and (len(values) != members or min(values) < 0 or sum(values) <= 0):
        raise ValueError(f"weights.values {values} are not one weight for each of {members} members")


def weights_of(settings: WeightsConfig, members: int) -> Weights:
    """The rule for so many members."""
    if isinstance(settings, GridWeights):
        return GridSearch(settings, members)
    return InverseError(settings, members) if isinstance(settings, InverseWeights) else Fixed(settings, members)


class Fixed:
    adaptive = False

    def __init__(self, settings: FixedWeights, members: int):
        values = settings.values or (1.0,) * members
        self.values = [value / sum(values) for value in values]

    def start(self, device: torch.device) -> None:
        self.current = torch.tensor(self.values, device=device)

    def observe(self, p: Tensor, q: Tensor) -> None:
        pass


class History:
    """Scores of past positions: their sum over all, or over the last `window`. Memory does not grow."""

    def __init__(self, window: int | None):
        self.window = window
        self._scores: Tensor | None = None  # [S] sums, or [window,S] with the newest last

    def add(self, scores: Tensor) -> None:
        """Scores [P,S], oldest first."""
        if self.window is None:
            total = scores.sum(0, dtype=torch.float64)
            self._scores = total if self._scores is None else self._scores + total
        else:
            scores = scores.double()
            self._scores = (scores if self._scores is None else torch.cat([self._scores, scores]))[-self.window :]

    def total(self) -> Tensor:
        """[S] float64."""
        assert self._scores is not None, "nothing was observed"
        return self._scores if self.window is None else self._scores.sum(0)


class GridSearch:
    adaptive = True

    def __init__(self, settings: GridWeights, members: int):
        self.settings, self.members = settings, members

    def start(self, device: torch.device) -> None:
        """Make the grid's weights [G,R]; begin with equal weights and no history."""
        points = grid(self.members, self.settings.parts)
        self.points = torch.tensor(points[::-1] if self.settings.order == "article" else points, device=device)
        self.hits, self.divergence = History(self.settings.window), History(self.settings.window)
        self.current = torch.full((self.members,), 1 / self.members, device=device)

    def observe(self, p: Tensor, q: Tensor) -> None:
        """Score every weight of the grid at each position, then take the best one over the history."""
        score = self.settings.score
        by: Literal["kl", "tvd"] | None = None if score == "hits" else "tvd" if score == "tvd" else "kl"
        hits, divergence = grid_scores(self.points, p, q, hits=score in ("hits", "hits-then-kl"), divergence=by)
        if hits is not None:
            self.hits.add(hits)
        if divergence is not None:
            self.divergence.add(divergence)
        # Of equal ones argmin and argmax name the first.
        if score == "hits":
            best = self.hits.total().argmax()
        else:
            apart = self.divergence.total()
            if score == "hits-then-kl":
                total = self.hits.total()
                apart = apart.masked_fill(total < total.max(), float("inf"))
            best = apart.argmin()
        # `points[index]` would wait for the device.
        self.current = self.points.index_select(0, best[None])[0]


class InverseError:
    adaptive = True

    def __init__(self, settings: InverseWeights, members: int):
        self.settings, self.members = settings, members

    def start(self, device: torch.device) -> None:
        self.errors = History(self.settings.window)
        self.current = self._weights(torch.ones(self.members, dtype=torch.float64, device=device))

    def observe(self, p: Tensor, q: Tensor) -> None:
        """Add each draft's errors, then weight the drafts by the inverse of the sums."""
        self.errors.add(errors(p, q, self.settings.error))
        total = self.errors.total()
        self.current = self._weights(torch.where(total == 0, _FLAWLESS, 1 / total))

    def _weights(self, raw: Tensor) -> Tensor:
        """[R] of sum 1 from raw weights; before the first cycle those are equal."""
        temperature = self.settings.temperature
        if temperature == 0:
            return torch.nn.functional.one_hot(raw.argmax(), self.members).float()
        if self.settings.form == "softmax":
            return torch.softmax(raw / temperature, dim=0).float()
        # Relative to the largest, so that no power overflows.
        tempered = (raw / raw.max()) ** (1 / temperature)
        return (tempered / tempered.sum()).float()


@functools.cache
def grid(members: int, parts: int) -> list[tuple[float, ...]]:
    """All weights of sum 1 in steps of 1 / parts, from (0, ..., 1) to (1, ..., 0), the last but one varying fastest."""
    counts = itertools.product(range(parts + 1), repeat=members - 1)
    return [(*(c / parts for c in front), (parts - sum(front)) / parts) for front in counts if sum(front) <= parts]


def mixture(weights: Tensor, q: Tensor) -> Tensor:
    """Sum of weights [R] times q [R,N,V]: [N,V]. One draft of weight 1 stays as it is, to the last bit."""
    return q[0] * weights[0] if len(q) == 1 else (q * weights[:, None, None]).sum(0)


def grid_scores(
    points: Tensor, p: Tensor, q: Tensor, *, hits: bool, divergence: Literal["kl", "tvd"] | None
) -> tuple[Tensor | None, Tensor | None]:
    """How the mixture of q [R,P,V] by each of `points` [G,R] does at each position: ([P,G] hits, [P,G] divergence). A
    hit is a position whose likeliest token is the target's; KL is given up to the entropy of p, the same for every
    weight.
    """
    best, flat, hits_of, apart = p.argmax(-1), q.flatten(1), [], []
    for some in points.split(max(1, _AT_ONCE // p.numel())):
        mixed = (some @ flat).view(len(some), *p.shape)  # [G,P,V]
        if hits:
            # On a CPU numpy finds it ten times as fast as torch, and this is most of the scoring.
            on_cpu = mixed.device.type == "cpu"
            hits_of.append(((torch.from_numpy(mixed.numpy().argmax(-1)) if on_cpu else mixed.argmax(-1)) == best).T)
        if divergence == "kl":
            apart.append(-(mixed.clamp_min_(_TINY).log_().transpose(0, 1) @ p[:, :, None])[..., 0])
        elif divergence == "tvd":
            apart.append(mixed.sub_(p).abs_().sum(-1).T)
    return (torch.cat(hits_of, 1) if hits else None), (torch.cat(apart, 1) if divergence else None)


def errors(p: Tensor, q: Tensor, error: Literal["kl", "tvd"]) -> Tensor:
    """[P,R] error of each draft q [R,P,V] at each position."""
    if error == "tvd":
        return (q - p).abs().sum(-1).T
    # Where p is 0 nothing is lost, where only q is the loss is large and finite. Rounding must not make a gain of it.
    lost = torch.special.xlogy(p, p) - p * q.clamp_min(_TINY).log()
    return lost.sum(-1).clamp_min(0).T
