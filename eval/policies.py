"""Tree policies: which nodes a cycle drafts. The loop knows none of them, and they know no drafter.

A policy sees distributions only through `expand`, which runs the drafter on nodes of the tree that is
growing. How a child is taken from a distribution is a separate axis, the `Draw`.
Letters: F nodes expanded at once, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..core.errors import UserError
from ..models.decoding.tree import ROOT, Tree
from .rules import Verified

Expand = Callable[[Sequence[int], Tensor], Tensor]  # (parents' slots [F], tokens [F]) -> q [F,V]
DrawName = Literal["top-k", "sample"]


@dataclass(frozen=True)
class Draw:
    """How children come from q: the k most likely, or k samples without replacement."""

    name: DrawName
    generator: torch.Generator | None = None

    @property
    def sampled(self) -> bool:
        return self.name == "sample"

    def __call__(self, q: Tensor, count: int) -> Tensor:
        """[F,V] -> tokens [F,count] in draw order. A token without probability is never drawn by choice."""
        if not self.sampled:
            return q.argmax(-1, keepdim=True) if count == 1 else q.topk(count, dim=-1).indices
        return torch.multinomial(q, count, replacement=False, generator=self.generator)

    def seeded(self, generator: torch.Generator | None, device: torch.device) -> Draw:
        """With a generator of its own, where q is, that follows from the request's on the CPU."""
        if not self.sampled or self.generator is not None:
            return self
        seed = int(torch.randint(2**62, (), generator=generator))
        return replace(self, generator=torch.Generator(device).manual_seed(seed))


class TreePolicy(Protocol):
    name: str
    prunes_by_token: bool  # drops drawn nodes by their scores: not exact with sampled draws
    num_levels: int
    max_nodes: int

    def start(self) -> None:
        """A request begins. What was learned from the last one goes: a report must not depend on their order."""
        ...

    def grow(self, root: Tensor, expand: Expand, draw: Draw, *, max_levels: int) -> Tree:
        """A tree under the root, whose distribution is `root` [V], at most `max_levels` deep."""
        ...

    def observe(self, verified: Verified) -> None:
        """Told the outcome of each cycle, for policies that adapt."""
        ...


class Chain:
    """`gamma` tokens in a row."""

    name = "chain"
    prunes_by_token = False

    def __init__(self, gamma: int):
        self.num_levels = self.max_nodes = gamma

    def start(self) -> None:
        return None

    def grow(self, root: Tensor, expand: Expand, draw: Draw, *, max_levels: int) -> Tree:
        levels = min(self.num_levels, max_levels)
        q, tokens, rows = root[None], [], []
        for level in range(levels):
            token = draw(q, 1)[0]  # [1]
            tokens.append(token)
            if draw.sampled:
                rows.append(q[0])
            if level + 1 < levels:
                q = expand((level - 1,), token)
        parents = tuple(range(-1, levels - 1))
        slots = tuple(i if i + 1 < levels else -1 for i in range(levels))
        joined = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64, device=root.device)
        if not draw.sampled or not rows:
            return Tree(joined, parents, slots)
        return Tree(joined, parents, slots, torch.stack(rows), tuple(range(levels)))

    def observe(self, verified: Verified) -> None:
        return None


class Static:
    """A fixed tree given by choice paths, as Medusa's and EAGLE's lists: (0,), (1,), (0, 0), ...

    A path names the rank of the child taken at each level; every prefix of a path is a path.
    """

    name = "static"
    prunes_by_token = False

    def __init__(self, choices: Sequence[tuple[int, ...]]):
        self.choices = sorted(choices, key=lambda path: (len(path), path))
        known = set(self.choices)
        for path in self.choices:
            if path[:-1] and path[:-1] not in known:
                raise UserError(
                    f"choice {list(path)} has no parent {list(path[:-1])}", cure="list every prefix of a path"
                )
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                raise UserError(f"choice {list(path)} skips a sibling", cure="ranks under a node count up from 0")
        self.num_levels, self.max_nodes = len(self.choices[-1]), len(self.choices)

    def start(self) -> None:
        return None

    def grow(self, root: Tensor, expand: Expand, draw: Draw, *, max_levels: int) -> Tree:
        index: dict[tuple[int, ...], int] = {(): ROOT}
        parents: list[int] = []
        slots: list[int] = []
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        rows: list[int] = []
        frontier: list[tuple[int, ...]] = [()]
        q, num_slots = root[None], 0
        for level in range(1, min(self.num_levels, max_levels) + 1):
            here = [path for path in self.choices if len(path) == level]
            for row, parent in enumerate(frontier):
                children = [path for path in here if path[:-1] == parent]
                drawn = draw(q[row : row + 1], len(children))[0] if children else None
                for rank, path in enumerate(children):
                    assert drawn is not None
                    index[path] = len(parents)
                    parents.append(index[parent])
                    tokens.append(drawn[rank])
                    slots.append(ROOT)
                    rows.append(len(probs))
                if children and draw.sampled:
                    probs.append(q[row])
            inner = {path[:-1] for path in self.choices if len(path) == level + 1}
            frontier = [path for path in here if path in inner]
            if not frontier or level == max_levels:
                break
            nodes = [index[path] for path in frontier]
            parent_slots = [slots[parents[n]] if parents[n] != ROOT else ROOT for n in nodes]
            q = expand(parent_slots, torch.stack([tokens[n] for n in nodes]))
            for node in nodes:
                slots[node], num_slots = num_slots, num_slots + 1
        joined = torch.stack(tokens) if tokens else torch.empty(0, dtype=torch.int64, device=root.device)
        if not draw.sampled or not probs:
            return Tree(joined, tuple(parents), tuple(slots))
        return Tree(joined, tuple(parents), tuple(slots), torch.stack(probs), tuple(rows))

    def observe(self, verified: Verified) -> None:
        return None


def check_combination(*, temperature: float, draw: DrawName, policy: str, prunes_by_token: bool, rule: str) -> None:
    """Refuse what would not be exact, by name, before anything is loaded."""
    if draw == "sample" and prunes_by_token:
        raise UserError(
            f"tree {policy!r} prunes drawn nodes by their scores, which is not lossless with draw: sample",
            cure="use draw: top-k, or a tree whose shape is fixed before the draw (chain, static)",
        )
    if rule == "greedy" and temperature > 0:
        raise UserError("rule: greedy at a temperature above 0", cure="use rule: sampling, or temperature: 0")
    if rule != "greedy" and temperature == 0:
        raise UserError(f"rule: {rule} at temperature 0", cure="use rule: greedy, or a temperature above 0")
    if draw == "sample" and temperature == 0:
        raise UserError("draw: sample at temperature 0", cure="use draw: top-k")
