"""SAGE: a tree whose depth and width follow how sure the drafter was in the cycle before, and what was accepted.

Sure drafters get deep and narrow trees, unsure ones shallow and wide ones. The next tree depends on past cycles (and,
where it is grown online, on the draft's own distributions), never on what the target will say: it is exact at any
temperature. No code of the method is published; what the paper prints is the default, what it leaves open an option.
Source: SAGE, sections 3.1 to 3.3, equations 7 to 9, settings of section 5.1. Its tau is `num_accepted`, without the
bonus token. Its Lemma 4.3 (a bound on the likeliest token's probability) and Theorem 4.4 (acceptance guaranteed above
some confidence) do not hold, and nothing here rests on them.
Letters: F nodes, k likeliest tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...core.errors import Refused, did_you_mean
from ...core.fields import MOST_LEVELS
from ...core.json_types import JsonObject
from ...core.section import Section
from ...models.decoding.tree import ROOT, Tree
from ...models.targets.base import Verified
from .base import Draw, Expand, TreeSection
from .dynamic import candidates, most_written, read_ranked
from .sizing import Node, SizingRules, SizingSettings, grow_nodes
from .static import CHOICES, Static


class History(Section):
    """The deepest tree's adaptation to the drafts accepted lately (section 3.3, "adaptive history tracking").

    The paper gives the window and the two thresholds; step, bounds and what a change does to the window are ours.
    """

    # Cycles that the mean is taken over.
    window: int = Field(10, ge=1)
    # Mean accepted drafts, without the bonus token, below which trees get one level shallower, and above which one
    # level deeper; between the two nothing changes.
    low: float = Field(2.0, ge=0)
    high: float = Field(3.0, ge=0)
    # The deepest that a tree may get; the shallowest is min_depth.
    max_depth: int = Field(10, ge=1, le=MOST_LEVELS)
    # Whether nothing changes before the window is full.
    full_window: bool = True
    # Whether a change empties the window, so that the next one is judged by trees of the new depth.
    clear: bool = True

    @model_validator(mode="after")
    def _ordered(self) -> History:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class SageTree(TreeSection, SizingSettings):
    """SAGE's settings, those of the sizing rules among them."""

    kind: Literal["sage"]
    # How the next tree is made. template: a shape of ranks from the last cycle's distribution alone, as algorithm 1
    # prints it; the only one for draw: sample. online (ours): level by level from the draft's real distributions, its
    # depth and width from the last cycle; accepts more. dynamic (ours): EAGLE-2's beam with the sizing rules' depth and
    # width, for heads.
    growth: Literal["template", "online", "dynamic"] = "template"
    # The list of the first cycle, which has no past (static.py; the paper takes SpecVLM's 25 nodes).
    first_tree: str = "mc_sim_7b_63"
    # Which distribution of the last cycle says how sure the drafter was (the paper does not say): after the deepest
    # accepted node that was expanded, at the root, or the mean over all that it drafted from.
    confidence_from: Literal["deepest", "root", "mean"] = "deepest"
    # growth: dynamic. Nodes of a cycle's tree: up to max_nodes, or levels times width where that is less.
    total: Literal["max", "product"] = "max"
    # How the deepest tree follows what was accepted; null: it does not.
    history: History | None = History()

    @model_validator(mode="after")
    def _consistent(self) -> SageTree:
        if self.history is not None and self.history.max_depth < self.max_depth:
            raise ValueError(f"history.max_depth {self.history.max_depth} is below max_depth {self.max_depth}")
        if self.first_tree not in CHOICES:
            raise Refused("", f"first_tree names {self.first_tree!r}", did_you_mean(self.first_tree, CHOICES))
        return self

    def build(self, *, grid: int | None = None, seed: int = 0) -> Sage:
        return Sage(self)


# ---- How sure a drafter was: the entropy of what it proposed from, along the path that the target accepted


def confidence(probs: Tensor) -> Tensor:
    """[...,k] probabilities -> [...]: 1 where one token has all of them, 0 where all k have the same.

    The entropy is that of the renormalised k, over its largest value ln k. Where nothing is proposed, it is 0.
    """
    share = probs.double()
    total = share.sum(-1, keepdim=True)
    share = share / total.where(total > 0, 1.0)
    return (total[..., 0] > 0) * (1.0 - torch.special.entr(share).sum(-1) / math.log(share.shape[-1])).clamp(0.0, 1.0)


class Drafted:
    """The k largest probabilities of each distribution of one cycle: row 0 at the root, row 1 + s after expansion s."""

    def __init__(self, root: Tensor, top_k: int, draw: Draw):
        self.top_k, self._draw = min(top_k, root.shape[-1]), draw
        self.rows: list[Tensor] = [self.ranking(root[None])[0][0]]

    def ranking(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The k largest of q [F,V], as `draw` cuts them: probabilities [F,k] and ids."""
        return self._draw.ranked(q, self.top_k)

    def add(self, ranked: Tensor) -> None:
        """[F,k] of the next expansions."""
        self.rows += ranked.unbind()

    def watch(self, expand: Expand) -> Expand:
        """`expand` that keeps what it returns."""

        def watched(parents: Sequence[int], tokens: Tensor) -> Tensor:
            q = expand(parents, tokens)
            self.add(self.ranking(q)[0])
            return q

        return watched

    def ranked(self, rows: Sequence[int]) -> Tensor:
        """[F,k] float64 on the CPU, likeliest first. One synchronisation."""
        return torch.stack([self.rows[row] for row in rows]).double().cpu()

    def reached(self, tree: Tree, path: Sequence[int]) -> list[int]:
        """Rows at the root and along the accepted `path`, down to the last node that the drafter expanded."""
        rows = [0]
        for node in path:
            if tree.expansions[node] == ROOT:
                break
            rows.append(1 + tree.expansions[node])
        return rows


# ---- The policy


class DepthCap:
    """The deepest tree of one request. Without `settings` it stays at `start`."""

    def __init__(self, settings: History | None, *, start: int, least: int):
        self.settings, self.value, self.least = settings, start, least
        self._window: deque[int] = deque(maxlen=settings.window if settings else 1)

    def observe(self, accepted: int) -> None:
        """Move `value` by at most one level after a cycle with `accepted` drafts (without the bonus token)."""
        settings = self.settings
        if settings is None:
            return
        self._window.append(accepted)
        if settings.full_window and len(self._window) < settings.window:
            return
        mean, before = sum(self._window) / len(self._window), self.value
        if mean < settings.low:
            self.value = max(self.least, self.value - 1)
        elif mean > settings.high:
            self.value = min(settings.max_depth, self.value + 1)
        if settings.clear and self.value != before:
            self._window.clear()


class SageCycle(NamedTuple):
    """The log's entry of a cycle that drafted. The first tree is fixed: its first three fields say nothing."""

    confidence: float  # alpha, of the cycle before
    depth: float  # D(alpha)
    width: float  # W(alpha)
    cap: int  # D_max as history has moved it
    levels: int
    nodes: int
    accepted: int  # without the bonus token


# alpha of a request's first cycle (algorithm 1).
FIRST_CONFIDENCE = 0.5


class Sage:
    """Adapts the tree from cycle to cycle of one request. `log` holds the current request's cycles."""

    name = "sage"

    def __init__(self, settings: SageTree):
        self.settings = settings
        self.prunes_by_token = settings.growth != "template"
        self._first = Static(CHOICES[settings.first_tree])
        deepest = settings.max_depth if settings.history is None else settings.history.max_depth
        self.num_levels = max(deepest, self._first.num_levels)
        self.num_nodes = settings.max_nodes
        self.max_nodes = max(_most_slots(settings, deepest), self._first.max_nodes)
        self.start()

    def start(self) -> None:
        self.log: list[SageCycle] = []
        self.confidence = FIRST_CONFIDENCE
        self._cap = DepthCap(self.settings.history, start=self.settings.max_depth, least=self.settings.min_depth)
        self._shape: Static | None = self._first  # None: grown as the cycle goes
        self._drafted: Drafted | None = None

    def details(self) -> JsonObject:
        """The request's cycles, for its row."""
        return {"sage": [cycle._asdict() for cycle in self.log]}

    def sizing(self) -> SizingRules:
        """Depth, width and thresholds of the next tree."""
        return SizingRules.of(self.settings, self.confidence, cap=self._cap.value)

    def grow(self, root: Tensor, expand: Expand, draw: Draw, *, max_levels: int) -> Tree:
        assert not (draw.sampled and self.prunes_by_token), "check_combination refuses this"
        self._drafted = drafted = Drafted(root, self.settings.top_k, draw)
        if self._shape is not None:
            return self._shape.grow(root, drafted.watch(expand), draw, max_levels=max_levels)
        sizing = self.sizing()
        if self.settings.growth == "online":
            levels = min(sizing.levels, max_levels)
            return grow_online(sizing, root, expand, drafted, levels=levels, ends=draw.ends)
        width, levels = min(sizing.beam, self.settings.max_nodes), min(sizing.levels, max_levels)
        most = self.settings.max_nodes
        total = most if self.settings.total == "max" else min(most, sizing.levels * width)
        beam = candidates(root, drafted.watch(expand), width=width, levels=levels, draw=draw)
        return beam.best(total, planned=sizing.levels)

    def observe(self, verified: Verified) -> None:
        tree, drafted, self._drafted = verified.tree, self._drafted, None
        if drafted is None or tree is None:
            return
        sizing, accepted = self.sizing(), verified.num_accepted
        self.log.append(
            SageCycle(
                self.confidence, sizing.depth, sizing.width, self._cap.value, tree.num_levels, tree.num_nodes, accepted
            )
        )
        reached = drafted.reached(tree, verified.path)
        which = {"deepest": reached[-1:], "root": [0], "mean": range(len(drafted.rows))}[self.settings.confidence_from]
        ranked = drafted.ranked(which)
        self.confidence = float(confidence(ranked).mean())
        self._cap.observe(accepted)
        self._shape = template(self.sizing(), ranked.mean(0).tolist()) if self.settings.growth == "template" else None


def template(sizing: SizingRules, ranked: Sequence[float]) -> Static:
    """The tree of ranks where each node's k likeliest children have the probabilities `ranked`."""
    nodes = grow_nodes(sizing, ranked, lambda nodes: [ranked] * len(nodes), levels=sizing.levels)
    return Static([node.path for node in nodes] or [(0,)])


def grow_online(
    sizing: SizingRules, root: Tensor, expand: Expand, drafted: Drafted, *, levels: int, ends: Collection[int] = ()
) -> Tree:
    """The tree of the draft's real distributions. One synchronisation for each level; nothing grows below `ends`."""
    (children,), (first,) = (part.tolist() for part in read_ranked(drafted.ranking(root[None])))
    tokens: dict[tuple[int, ...], list[int]] = {(): children}  # path -> tokens of its children by rank
    expansions: dict[tuple[int, ...], int] = {(): ROOT}

    def below(nodes: Sequence[Node]) -> list[Sequence[float]]:
        # A child is at most as likely as its path: below the threshold there is nothing to ask the drafter for.
        going = [node for node in nodes if sizing.may_have_children(node)]
        parents = [node for node in going if tokens[node.path[:-1]][node.path[-1]] not in ends]
        if not parents:
            return [[] for _ in nodes]
        ids = [tokens[node.path[:-1]][node.path[-1]] for node in parents]
        q = expand([expansions[node.path[:-1]] for node in parents], torch.tensor(ids))
        best = drafted.ranking(q)
        drafted.add(best[0])
        ranked: dict[tuple[int, ...], Sequence[float]] = {}
        for node, indices, values in zip(parents, *(part.tolist() for part in read_ranked(best)), strict=True):
            expansions[node.path] = len(expansions) - 1
            ranked[node.path], tokens[node.path] = values, indices
        return [ranked.get(node.path, []) for node in nodes]

    nodes = grow_nodes(sizing, first, below, levels=levels)
    paths = sorted((node.path for node in nodes), key=lambda path: (len(path), path)) or [(0,)]
    index = {path: place for place, path in enumerate(paths)} | {(): ROOT}
    return Tree(
        torch.tensor([tokens[path[:-1]][path[-1]] for path in paths]),
        tuple(index[path[:-1]] for path in paths),
        tuple(expansions.get(path, ROOT) for path in paths),
        planned=sizing.levels,
    )


def _most_slots(settings: SageTree, deepest: int) -> int:
    """Most nodes that a cycle writes: of its tree, or expansions of the drafter where those are more."""
    if settings.growth == "template":
        return settings.max_nodes
    if settings.growth == "dynamic":
        widest = SizingRules.of(settings, 0.0, cap=deepest).beam
        return most_written(settings.max_nodes, depth=deepest - 1, width=widest)
    widest_sizing, level_nodes, expansions = SizingRules.of(settings, 0.0, cap=deepest), 1, 0
    for level in range(1, deepest):
        level_nodes = min(settings.max_nodes, level_nodes * widest_sizing.num_children(level, parent=1.0))
        expansions += level_nodes
    return max(settings.max_nodes, expansions)
