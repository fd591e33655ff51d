"""Block verification: a sampled chain is accepted as a whole, not token by token (Sun et al. 2024, arXiv 2403.10444).

Exact as `Sampling` is, and never shorter on average: a token whose p/q is above 1 makes up for one before it whose
p/q is below. Letters: N nodes without the root, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.errors import UserError
from ..core.finite import NotFinite
from ..models.decoding.tree import Tree
from ..models.decoding.warp import Distributions
from .rules import SCORES, RuleSection, Verified, inverse_cdf, positive_part


class BlockConfig(RuleSection):
    """No settings of its own: chains with draw: sample, above temperature 0."""

    kind: Literal["block"]
    is_exact: ClassVar[bool] = True

    def build(self, temperature: float) -> Block:
        return Block()


class Block:
    """Keep the longest prefix whose own draw accepts it; then draw from what the target still owes there.

    Let w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)): the part of the prefix x_1..x_i that the target has a claim
    to. The whole chain is accepted with probability w_N. A shorter prefix owes s_i = sum_x (w_i p(x) - q(x))+ over
    the next token, and is accepted with probability s_i / (s_i + 1 - w_i), the token after it then drawn from the
    normalised (w_i p - q)+.
    """

    name = "block"

    def __call__(self, tree: Tree, p: Tensor | Distributions, uniforms: Sequence[float]) -> Verified:
        """`p` [N+1,V] warped probabilities; takes one uniform for each node and one for the token after the path."""
        _check(tree)
        p, draws = Distributions.of(p).whole(), iter(uniforms)
        n = tree.num_nodes
        if tree.draft_probs is None:
            return Verified((), (), inverse_cdf(p[0], float(next(draws))))
        rows = torch.arange(n, device=p.device)
        q = tree.draft_probs[torch.tensor(tree.parent_rows, device=p.device)]  # [N,V] row i: what node i was drawn from
        ids = tree.tokens.to(p.device)
        drawn = torch.stack([ids.double(), p[rows, ids].double(), q[rows, ids].double()])
        tokens, target, draft = drawn.tolist()
        weights = [1.0]
        for i in range(n):
            assert draft[i] > 0, f"node {i} was drawn with probability 0"
            if not math.isfinite(target[i]):
                raise NotFinite(SCORES)
            weights.append(min(1.0, weights[-1] * target[i] / draft[i]))
        scale = torch.tensor(weights[:n], dtype=p.dtype, device=p.device)[:, None]
        owed = (scale * p[:n] - q).clamp(min=0.0)  # [N,V] row i: after i accepted tokens
        # Where nothing is owed, the block never ends.
        sums = zip(owed.sum(-1).tolist(), weights[:n], strict=True)
        chances = [s / (s + 1.0 - w) if s > 0 else 0.0 for s, w in sums] + [weights[n]]
        accepted = 0
        for length in range(1, n + 1):
            if float(next(draws)) < chances[length]:
                accepted = length
        rest = p[n] if accepted == n else positive_part(owed[accepted], p[accepted])
        path = tuple(range(accepted))
        bonus = inverse_cdf(rest, float(next(draws)))
        return Verified(path, tuple(int(t) for t in tokens[:accepted]), bonus)


def _check(tree: Tree) -> None:
    if not tree.is_chain:
        raise UserError("rule: block on a tree that branches", hint="use tree: chain, or rule: sampling")
    if tree.num_nodes and tree.draft_probs is None:
        raise UserError("rule: block with proposals that were not drawn", hint="use draw: sample, or rule: sampling")
