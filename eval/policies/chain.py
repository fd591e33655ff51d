"""The trivial tree: tokens in a row.

Letters: V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ...core.fields import MOST_NODES
from ...models.decoding.tree import Tree, chain
from .base import Draw, Expand, TreePolicy, TreeSection, ends_read, proposes_nothing


class Chain(TreePolicy):
    """`gamma` tokens in a row, fewer where one of them ends the answer."""

    name = "chain"
    prunes_by_token = False

    def __init__(self, gamma: int):
        self.num_levels = self.num_nodes = self.max_nodes = gamma

    def grow(self, root: Tensor, expand: Expand, draw: Draw, *, max_levels: int) -> Tree:
        levels = min(self.num_levels, max_levels)
        q, tokens, rows, ends = root[None], [], [], ends_read(draw, root.device)
        for level in range(levels):
            if proposes_nothing(q[0]):
                break
            token = draw(q, 1)[0]  # [1]
            tokens.append(token)
            if draw.sampled:
                rows.append(q[0])
            if level + 1 == levels or (ends and int(token) in ends):
                break
            q = expand((level - 1,), token)
        joined = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64, device=root.device)
        return chain(joined, torch.stack(rows) if rows else None, planned=self.num_levels)


class ChainTree(TreeSection):
    kind: Literal["chain"]
    # Tokens drafted in a cycle. Longer pays while most are accepted and a draft is cheap beside a target pass.
    gamma: int = Field(5, ge=1, le=MOST_NODES)

    @property
    def chain_length(self) -> int:
        return self.gamma

    def build(self, *, grid: int | None = None, seed: int = 0) -> Chain:
        return Chain(self.gamma)
