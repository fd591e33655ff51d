"""A tree of fixed shape, given by choice paths as Medusa's and EAGLE's lists.

Its shape stands before anything is drawn, so it is exact with sampled draws too (EAGLE-1, LANTERN++).
Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import model_validator
from torch import Tensor

from ...core.errors import UserError, did_you_mean
from ...core.section import Section
from ...models.decoding.tree import ROOT, Tree
from ..rules import Verified
from .base import Draw, Expand
from .choices import CHOICES


class Static:
    """A fixed tree given by choice paths, as Medusa's and EAGLE's lists: (0,), (1,), (0, 0), ...

    A path names the rank of the child taken at each level; every prefix of a path is a path.
    """

    name = "static"
    prunes_by_token = False

    def __init__(self, choices: Sequence[tuple[int, ...]]):
        self.choices = sorted(choices, key=lambda path: (len(path), path))
        known = set(self.choices)
        if not known or len(known) < len(self.choices) or () in known:
            raise UserError(
                "choices are empty, hold an empty path, or hold one twice", cure="list each node's path once"
            )
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


class StaticTree(Section):
    kind: Literal["static"]
    # A published list by its name (choices.py), or paths: [[0], [1], [0, 0]] is two children, the first with one child.
    choices: str | tuple[tuple[int, ...], ...]

    @model_validator(mode="after")
    def _known(self) -> StaticTree:
        if isinstance(self.choices, str) and self.choices not in CHOICES:
            raise ValueError(f"choices names {self.choices!r}; {did_you_mean(self.choices, CHOICES)}")
        self.build()
        return self

    def build(self, *, grid: int | None = None, seed: int = 0) -> Static:
        return Static(CHOICES[self.choices] if isinstance(self.choices, str) else self.choices)
