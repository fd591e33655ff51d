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

from ...core.errors import Refused, UserError, did_you_mean
from ...core.fields import MOST_LEVELS, MOST_NODES
from ...models.decoding.tree import ROOT, Tree
from .base import Draw, Expand, TreePolicy, TreeSection, ends_read, proposes_nothing


def _paths(words: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(rank) for rank in word) for word in words.split())


# Published trees by the names that their authors gave them. A word is a path: `021` is the first child (0) of the root,
# its third child (2), and that one's second child (1). Sources: EAGLE (mc_sim_7b_63, its default; the name counts 63
# and the tree has 25 nodes) and LANTERN (the others); window_25 is ours.
CHOICES: dict[str, tuple[tuple[int, ...], ...]] = {
    "chain5": _paths("0 00 000 0000 00000"),
    # Levels of 4, 8, 8, 3 and 2 nodes.
    "mc_sim_7b_63": _paths(
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    ),
    # 3, 8, 9, 3 and 2.
    "mc_sim_7b_63_balanced": _paths(
        "0 1 2 00 01 02 10 11 12 20 21 000 001 002 010 011 100 101 110 111 0000 0001 0002 00000 00001"
    ),
    # Four siblings where Jacobi's window begins, and the line of first children behind them.
    "window_25": (*_paths("0 1 2 3"), *((0,) * levels for levels in range(2, 23))),
    # 5, 13, 16, 14 and 9: LANTERN's default.
    "naive_extend_57": _paths(
        "0 1 2 3 4 "
        "00 01 02 03 10 11 12 20 21 22 30 31 40 "
        "000 001 002 003 010 011 012 020 021 022 030 031 100 101 110 200 "
        "0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 0200 "
        "00000 00001 00002 00010 00011 00100 00101 00110 00200"
    ),
}


class Static(TreePolicy):
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
                "choices are empty, hold an empty path, or hold one twice", hint="list each node's path once"
            )
        for path in self.choices:
            if path[:-1] and path[:-1] not in known:
                raise UserError(
                    f"choice {list(path)} has no parent {list(path[:-1])}", hint="list every prefix of a path"
                )
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                raise UserError(f"choice {list(path)} skips a sibling", hint="ranks under a node count up from 0")
        self.num_levels, self.num_nodes = len(self.choices[-1]), len(self.choices)
        self.max_nodes = self.num_nodes
        self._children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}  # of the paths that have any
        for path in self.choices:
            self._children.setdefault(path[:-1], []).append(path)

    def grow(self, root: Tensor, expand: Expand, draw: Draw, *, max_levels: int) -> Tree:
        if (most := max(map(len, self._children.values()))) > (num_ids := root.shape[-1]):
            raise UserError(f"a node of the static tree has {most} children, and the drafter {num_ids} ids",
                            key="tree.choices", hint="give choices of fewer siblings")  # fmt: skip
        tokens: dict[tuple[int, ...], Tensor] = {}  # in the order of `choices`
        expansions: dict[tuple[int, ...], int] = {}  # of what the drafter expanded
        probs: list[Tensor] = []
        rows: list[int] = []
        frontier: list[tuple[int, ...]] = [()]
        q, levels, ends = root[None], min(self.num_levels, max_levels), ends_read(draw, root.device)
        for level in range(1, levels + 1):
            for row, parent in enumerate(frontier):
                if proposes_nothing(q[row]):
                    continue
                children = self._children[parent]
                tokens |= zip(children, draw(q[row : row + 1], len(children))[0], strict=True)
                if draw.sampled:
                    rows += [len(probs)] * len(children)
                    probs.append(q[row])
            frontier = [path for path in tokens if len(path) == level and path in self._children]
            if ends and frontier and level < levels:
                ids = torch.stack([tokens[path] for path in frontier]).tolist()
                frontier = [path for path, token in zip(frontier, ids, strict=True) if token not in ends]
            if not frontier or level == levels:
                break
            q = expand(
                [expansions.get(path[:-1], ROOT) for path in frontier], torch.stack([tokens[p] for p in frontier])
            )
            expansions |= {path: expansion for expansion, path in enumerate(frontier, len(expansions))}
        index = {path: node for node, path in enumerate(tokens)} | {(): ROOT}
        joined = torch.stack([*tokens.values()]) if tokens else torch.empty(0, dtype=torch.int64, device=root.device)
        parents = tuple(index[path[:-1]] for path in tokens)
        slot_of = tuple(expansions.get(path, ROOT) for path in tokens)
        return Tree(
            joined, parents, slot_of, torch.stack(probs) if probs else None, tuple(rows), self.num_levels, by_path=True
        )


class StaticTree(TreeSection):
    kind: Literal["static"]
    # A published list by its name (static.py), or paths: [[0], [1], [0, 0]] is two children, the first with one child.
    choices: str | tuple[tuple[int, ...], ...]

    @property
    def paths(self) -> Sequence[tuple[int, ...]]:
        """Those that are spelt out, or the published list's. Raises `Refused` for a name that no list has."""
        if not isinstance(self.choices, str):
            return self.choices
        if self.choices not in CHOICES:
            raise Refused("", f"choices names {self.choices!r}", did_you_mean(self.choices, CHOICES))
        return CHOICES[self.choices]

    @model_validator(mode="after")
    def _known(self) -> StaticTree:
        paths = self.paths
        if len(paths) > MOST_NODES or any(len(path) > MOST_LEVELS for path in paths):
            raise ValueError(f"choices holds more than {MOST_NODES} nodes, or than {MOST_LEVELS} levels")
        if any(not 0 <= rank < MOST_NODES for path in paths for rank in path):
            raise ValueError(f"choices names a rank outside 0 to {MOST_NODES - 1}")
        self.build()
        return self

    def build(self, *, grid: int | None = None, seed: int = 0) -> Static:
        return Static(self.paths)
