"""How sure a drafter was: the entropy of what it proposed from, read along the path that the target accepted.

Source: SAGE, section 3.1, equations 7 to 9. Its Lemma 4.3 (a bound on the likeliest token's probability) and Theorem
4.4 (acceptance guaranteed above some confidence) do not hold, and nothing here rests on them.
Letters: F nodes, k likeliest tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...models.decoding.tree import ROOT, Tree
from .base import Draw, Expand


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
