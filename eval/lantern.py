"""LANTERN: a draft also counts what the target gives to its nearest neighbours in the codebook (sections 4.2, 4.3).

A relaxed rule: faster, and what comes out is *not* distributed as the target. The bound says how far it may stray
for one token. LANTERN++ bounds by a multiple of p(x) instead. The paper calls the target q and the drafter p;
here, as everywhere, `p` is the target's. Letters: N nodes without the root, R rows of p, V vocabulary, K neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..core.errors import UserError
from ..core.finite import NotFinite, likeliest
from ..models.decoding.neighbours import Metric, NeighbourTable, load_neighbours
from ..models.decoding.tree import ROOT, Tree, upload_tokens
from ..models.decoding.warp import Distributions
from .rules import SCORES, Codes, RuleSection, Verified, descend, positive_part, read_with, without


class LanternConfig(RuleSection):
    """How far acceptance is relaxed. `delta` 0 with the paper's residual is exact acceptance."""

    kind: Literal["lantern"]
    # Nearest codes that may lend their mass. The paper's k counts the token itself: k - 1 others may lend. The released
    # code's (residual: reference) does not: k others. LlamaGen 1000, Anole 100, LANTERN++ 10.
    k: int = Field(1000, ge=1)
    # "additive": the divergence stays below delta. "multiplicative": the mass lent stays below lambda p(x) (LANTERN++).
    bound: Literal["additive", "multiplicative"] = "additive"
    # Of the additive bound: 0.05 to 0.5, more is faster and blander. A JSD of 0.13 accepts about as a TVD of 0.2.
    delta: float | None = Field(None, ge=0, le=1)
    # Of the multiplicative bound: about 5 to 20, with a small k. The released code takes it as a delta of 1 + lambda.
    lambda_: float | None = Field(None, alias="lambda", ge=0)
    # Divergence of p with the mass moved from p; jsd in nats, at most 0.69. tvd is the mass moved, and cheaper.
    divergence: Literal["tvd", "jsd"] = "tvd"
    # Distance between codes; random neighbours are the control.
    metric: Metric = "l2"
    # What a rejection leaves: "paper" removes the set that lent, "reference" what the released code removes.
    residual: Literal["paper", "reference"] = "paper"

    @model_validator(mode="after")
    def _one_bound(self) -> LanternConfig:
        additive = self.bound == "additive"
        if (self.delta is None) == additive or (self.lambda_ is None) != additive:
            raise ValueError("the additive bound takes delta and the multiplicative one lambda, each only its own")
        if not additive and self.divergence == "jsd":
            raise ValueError("the multiplicative bound is on the mass moved: use divergence: tvd")
        return self

    @property
    def caution(self) -> str | None:
        """Why a bound of 0 is not the exact rule above temperature 0; None where it is, or where the bound is not 0."""
        if self.residual == "paper" or (self.delta if self.lambda_ is None else self.lambda_):
            return None
        name = "delta" if self.lambda_ is None else "lambda"
        return (
            f"residual: reference with {name} 0 is no exact baseline: a neighbour without probability (by top-k, top-p "
            "or an earlier rejection) counts as lending, and a rejection then removes "
            f"{self.k + 1} neighbours. For a baseline use rule: exact, or residual: paper"
        )

    def check_codebook(self, num_codes: int) -> None:
        self.num_neighbours(num_codes)

    def build_for_codes(self, temperature: float, codes: Codes) -> Lantern:
        needed = self.num_neighbours(len(codes.codebook))
        table = load_neighbours(
            codes.codebook, needed, metric=self.metric, offset=codes.offset, seed=codes.seed, folder=codes.folder
        )
        return Lantern(self, table, greedy=temperature == 0)

    @property
    def reach(self) -> int:
        """Neighbours besides the token that may lend."""
        return self.k - 1 if self.residual == "paper" else self.k

    def num_neighbours(self, num_codes: int) -> int:
        """Neighbours that the table must hold: the released code removes one more than may lend."""
        most = num_codes if self.residual == "paper" else num_codes - 1
        if self.k > most:
            raise UserError(f"lantern: k is {self.k}, in a codebook of {num_codes}", hint=f"k is at most {most}")
        return self.reach if self.residual == "paper" else min(self.k + 1, num_codes - 1)


class Proximity(NamedTuple):
    """The set A of each of N tokens: the token, and its nearest codes as far as the bound lets them lend."""

    mass: Tensor  # [N] sum of p over A
    size: Tensor  # [N] int64, the token included


@dataclass(frozen=True)
class Lantern:
    """The relaxed rule over any tree; the table lies on the device of p.

    Released code, where it differs from the paper ("reference"): k neighbours *besides* the token, a bound that
    may be met; and after a rejection for which anything lent, without draft distributions p loses all k+1
    neighbours of the token, with them q does, unnormalised, before it is taken from p (so that they keep their p).
    """

    config: LanternConfig
    table: NeighbourTable
    greedy: bool  # p is then scores

    name = "lantern"

    def __post_init__(self) -> None:
        needed = self.config.num_neighbours(self.table.num_codes)
        assert self.table.num_neighbours >= needed, (self.table.num_neighbours, needed)

    def __call__(self, tree: Tree, p: Tensor | Distributions, uniforms: Sequence[float] = ()) -> Verified:
        """`p` [N+1,V], row 0 at the root: scores where greedy, else warped probabilities."""
        p = Distributions.of(p)
        return self._greedy(tree, p.whole()) if self.greedy else self._sampling(tree, p, uniforms)

    def proximity(self, p: Tensor, rows: Tensor, tokens: Tensor) -> Proximity:
        """The sets of `tokens` [N] under the probabilities p[rows] (p [R,V], rows [N])."""
        members, known = self._members(tokens)
        return self._sets(p[rows[:, None], members], known)

    def _members(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [N,K+1] of each of `tokens` [N] and its neighbours; which are codes at all [N]."""
        neighbours, known = self.table.of(tokens, self.config.num_neighbours(self.table.num_codes))
        return torch.cat([tokens[:, None], neighbours], dim=-1), known

    def _sets(self, values: Tensor, known: Tensor) -> Proximity:
        """From p at the members [N,K+1]."""
        mass, near = values[:, :1], values[:, 1 : self.config.reach + 1]
        moved = near.cumsum(-1)
        cost = moved if self.config.divergence == "tvd" else moved_jsd(mass, moved)
        bound = self.config.delta if self.config.lambda_ is None else self.config.lambda_ * mass
        assert bound is not None
        lends = (cost < bound) if self.config.residual == "paper" else (cost <= bound)
        lends &= known[:, None]
        return Proximity(mass[:, 0] + near.where(lends, 0.0).sum(-1), lends.sum(-1) + 1)

    def _greedy(self, tree: Tree, scores: Tensor) -> Verified:
        """A node counts whose token is the most likely one once A's mass is moved onto it, ties included.

        Several siblings may: the longest path wins, among equals that of the first of the tree's leaves as the released
        code lists them. p is the softmax at temperature 1 without truncation.
        """
        p = scores.softmax(-1)
        ids, rows = _on_device(tree, p.device)
        mass, size = self.proximity(p, rows, ids)
        best = likeliest(scores)
        accepted = (best[rows] == ids) | ((size > 1) & (mass >= p.amax(-1)[rows]))
        tokens, joined = read_with(tree, torch.cat([best, accepted.to(best)]))
        path = _longest(tree, joined[tree.num_nodes + 1 :])
        if (bonus := joined[path[-1] + 1 if path else 0]) < 0:
            raise NotFinite(SCORES)
        return Verified(path, tuple(tokens[node] for node in path), bonus)

    def _sampling(self, tree: Tree, p: Distributions, uniforms: Sequence[float]) -> Verified:
        """Verifies as `Sampling` does, with the mass of A in the place of p(x)."""
        draws = iter(uniforms)
        (ids, above), probs, tokens = _on_device(tree, p.device), tree.draft_probs, tree.tokens.tolist()
        members, known = self._members(ids)
        weights: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)] * len(tokens)
        if not p.one_by_one:
            # All nodes at once: good for first children. The later ones meet what a rejection left.
            drawn = None if probs is None else probs[torch.tensor(tree.parent_rows, device=p.device), ids]
            weights = self._weigh(p.whole()[above[:, None], members], known, drawn)

        def trial(node: int) -> tuple[int | None, Tensor]:
            rest = p.row(node + 1)
            q: Tensor | None = None
            for rank, child in enumerate(tree.children.get(node, ())):
                if probs is not None and q is None:
                    q = probs[tree.parent_rows[child]]
                here = slice(child, child + 1)
                if rank > 0 or p.one_by_one:
                    weights[here] = self._weigh(rest[members[here]], known[here], None if q is None else q[ids[here]])
                mass, size, q_mass = weights[child]
                if float(next(draws)) < mass / (q_mass or 1.0):
                    return child, rest
                # A child that q gives nothing fills a place undrawn: a point mass, as in `Sampling`.
                rest = self._residual(rest, q if q_mass else None, members[child], int(size))
                if q is not None and q_mass:
                    q = without(q, tokens[child])
            return None, rest

        return descend(tokens, draws, trial)

    def _weigh(self, values: Tensor, known: Tensor, drawn: Tensor | None) -> list[tuple[float, float, float]]:
        """(mass of A, its size, q(x) or 0) of each of N tokens, from p at their members; one synchronisation."""
        mass, size = self._sets(values, known)
        columns = [mass, size.to(mass), torch.zeros_like(mass) if drawn is None else drawn]
        return [(m, s, q) for m, s, q in torch.stack(columns, dim=-1).tolist()]

    def _residual(self, rest: Tensor, q: Tensor | None, members: Tensor, size: int) -> Tensor:
        """What the rejection of members[0] leaves of `rest` [V]; `size` of them are in A. q None: a point mass."""
        if self.config.residual == "paper":
            left = rest.index_fill(0, members[:size], 0.0)
            return positive_part(left if q is None else left - q, rest)
        if q is not None:
            return positive_part(rest - q.index_fill(0, members[1:] if size > 1 else members[:0], 0.0), rest)
        left = rest.index_fill(0, members if size > 1 else members[:1], 0.0)
        # The k+1 neighbours may have held everything: any code then (released: any id, also one that is no code).
        codes = torch.zeros_like(rest)
        codes[self.table.offset : self.table.offset + self.table.num_codes] = 1 / self.table.num_codes
        return positive_part(left, codes)


def moved_jsd(mass: Tensor, moved: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats between p and p with `moved` of it put on a token that has `mass`.

    Only the changed entries count. One that gives v away adds v ln(2) / 2, and the token, with c = own + moved / 2
    and h = moved / 2, ((c - h) ln(1 - h/c) + (c + h) ln(1 + h/c)) / 2. It grows with `moved`, whichever entries gave.
    """
    half = moved / 2
    middle = mass + half
    limits = torch.finfo(middle.dtype)
    share = (half / middle.clamp(min=limits.tiny)).clamp(max=1 - limits.eps)
    return (moved * math.log(2) + mass * torch.log1p(-share) + (mass + moved) * torch.log1p(share)) / 2


def _on_device(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor]:
    """The nodes' tokens [N], and the row of p that decides about each of them [N]: its parent's."""
    ids, rows = upload_tokens(device, tree.tokens, np.array(tree.parents, dtype=np.int64) + 1)
    return ids, rows


def _longest(tree: Tree, accepted: Sequence[int]) -> tuple[int, ...]:
    """The longest path of accepted nodes from the root; among equals the one towards the first of the leaves."""
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}  # to the last accepted node on the way to each node
    for node, parent in enumerate(tree.parents):
        before = paths[parent]
        whole = parent == ROOT or before[-1:] == (parent,)
        paths[node] = (*before, node) if whole and accepted[node] else before
    return max((paths[leaf] for leaf in tree.leaves), key=len, default=())
