"""Acceptance rules: pure functions of a tree, the target's distributions and uniform draws.

`p` is the target's, `q` the drafter's probability (LANTERN writes them the other way round).
Letters: N nodes without the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..core.finite import NotFinite, likeliest
from ..models.decoding.tree import ROOT, Tree
from ..models.targets.base import TargetStep

SCORES = "the scores that a token is drawn from"


@dataclass(frozen=True)
class Verified:
    """The outcome of a cycle."""

    path: tuple[int, ...]  # accepted nodes from the root down
    tokens: tuple[int, ...]  # their tokens
    bonus: int  # the token after them, the target's own
    target_probs: Tensor  # [len(path)+1,V] p at the root and along the path
    step: TargetStep | None = None  # what the target computed at the root and along the path
    tree: Tree | None = None
    ended: bool = False  # the bonus token is an end token that was drafted and accepted: nothing could follow it

    def until_end(self, eos_ids: Collection[int]) -> Verified:
        """Up to the first accepted end token, which takes the bonus token's place.

        TABED's released loop counts alike: a drafted end token saves no pass, for the target would have added it.
        """
        place = next((n for n, token in enumerate(self.tokens) if token in eos_ids), None)
        if place is None:
            return self
        kept, probs = self.path[:place], self.target_probs[: place + 1]
        return replace(
            self, path=kept, tokens=self.tokens[:place], bonus=self.tokens[place], target_probs=probs, ended=True
        )

    @property
    def num_accepted(self) -> int:
        """Drafted tokens accepted, without the bonus token: one less than the cycle emits."""
        return len(self.path)


class Rule(Protocol):
    """`uniforms` holds at least `num_nodes + 1` draws from [0,1); they are used from the front."""

    name: str

    def __call__(self, tree: Tree, p: Tensor, uniforms: Sequence[float]) -> Verified: ...


class Greedy:
    """Accept a node whose token is the target's most likely one. Exact for greedy decoding."""

    name = "greedy"

    def __call__(self, tree: Tree, p: Tensor, uniforms: Sequence[float] = ()) -> Verified:
        """`p` [N+1,V], row 0 at the root: probabilities or scores, only their largest entry counts."""
        best = likeliest(p)
        joined = torch.cat([best, tree.tokens.to(best)]).tolist()  # the cycle's one synchronisation
        best_ids, tokens = joined[: tree.num_nodes + 1], joined[tree.num_nodes + 1 :]
        path: list[int] = []
        node = ROOT
        while True:
            match = [child for child in tree.children.get(node, ()) if tokens[child] == best_ids[node + 1]]
            if not match:
                break
            node = match[0]
            path.append(node)
        if best_ids[node + 1] < 0:
            raise NotFinite(SCORES)
        return Verified(tuple(path), tuple(tokens[n] for n in path), best_ids[node + 1], along(p, path))


class Sampling:
    """Speculative sampling over a tree: what comes out is distributed as the target, whatever was proposed.

    Siblings are tried in the order in which they were drawn. A child sampled from q is accepted with
    probability min(1, p/q); on rejection p becomes the normalised positive part of p - q, and the child
    leaves q, which is how the next one was drawn (without replacement). A deterministic child, or one
    that q gives nothing, is a point mass: accepted with probability p, and removed from p otherwise.
    """

    name = "sampling"

    def __call__(self, tree: Tree, p: Tensor, uniforms: Sequence[float]) -> Verified:
        """`p` [N+1,V], row 0 at the root: warped probabilities. The host waits once, once more for each sampled sibling
        behind a rejected one, and once for the bonus token.
        """
        draws = iter(uniforms)
        tokens, first_p, first_q = _at_tokens(tree, p)

        def trial(node: int) -> tuple[int | None, Tensor]:
            siblings = _Siblings(p[node + 1], tree, node)
            for rank, child in enumerate(tree.children.get(node, ())):
                mass, q_mass = (first_p[child], first_q[child]) if rank == 0 else siblings.masses(first_p, child)
                if float(next(draws)) < mass / (q_mass or 1.0):
                    return child, siblings.rest
                siblings.reject(tokens[child], first_p[child], drawn=q_mass > 0.0)
            return None, siblings.rest

        return descend(p, tokens, draws, trial)


def _at_tokens(tree: Tree, p: Tensor) -> tuple[list[int], list[float], list[float]]:
    """Of each node: its token, and p and q (0 without a distribution) of the token as its first sibling meets them."""
    n = tree.num_nodes
    if not n:
        return [], [], []
    ids = tree.tokens.to(p.device)
    rows = torch.tensor([tree.parents, tree.parent_rows or tree.parents], device=p.device)
    own = p[rows[0] + 1, ids].double()
    drawn = torch.zeros_like(own) if tree.draft_probs is None else tree.draft_probs[rows[1], ids].double()
    joined = torch.cat([ids.double(), own, drawn]).tolist()  # the first synchronisation
    return [int(t) for t in joined[:n]], joined[n : 2 * n], joined[2 * n :]


class _Siblings:
    """The children of a node, tried in turn: what their rejections leave of p, and of the q that they were drawn from.

    A rejected point mass takes its token out of p: the host can follow that by the tokens' own masses. What a rejected
    draw takes only the whole distributions tell.
    """

    def __init__(self, p: Tensor, tree: Tree, node: int):
        self.rest, self._tree, self._mass_left, self._drew = p, tree, 1.0, False
        children = tree.children.get(node, ())
        self._q = tree.draft_probs[tree.parent_rows[children[0]]] if tree.draft_probs is not None and children else None

    def masses(self, own: Sequence[float], child: int) -> tuple[float, float]:
        """p and q of the child's token behind the rejections so far."""
        if self._q is None:
            return (own[child] / self._mass_left if self._mass_left > 0 else 0.0), 0.0
        token = self._tree.tokens[child].to(self.rest.device)
        mass, q_mass = torch.stack([self.rest[token], self._q[token]]).tolist()
        return mass, q_mass

    def reject(self, token: int, own: float, *, drawn: bool) -> None:
        if self._q is not None and drawn:
            self.rest, self._q = positive_part(self.rest - self._q, self.rest), without(self._q, token)
        else:
            self._mass_left -= own
            # Nothing is left where rounding alone rejected the only token.
            left = self.rest.clone()
            left[token] = 0.0
            self.rest = positive_part(left, self.rest)


# The children of a node tried in turn: the accepted one or None, and what the rejections before left of p.
Trial = Callable[[int], tuple[int | None, Tensor]]


def descend(p: Tensor, tokens: Sequence[int], draws: Iterator[float], trial: Trial) -> Verified:
    """From the root down for as long as a child is accepted; the bonus is drawn from what the last rejections left.

    Args:
        p: [N+1,V], row 0 at the root.
        tokens: of each node.
        draws: that `trial` draws from too.
    """
    path: list[int] = []
    accepted, rest = trial(ROOT)
    while accepted is not None:
        path.append(accepted)
        accepted, rest = trial(accepted)
    bonus = inverse_cdf(rest, float(next(draws)))
    return Verified(tuple(path), tuple(tokens[n] for n in path), bonus, along(p, path))


def inverse_cdf(probs: Tensor, uniform: float) -> int:
    """The token that a uniform draw falls on; one without probability is never returned. One synchronisation.

    Raises:
        NotFinite: there is no probability at all, or it is no number.
    """
    cumulative = probs.double().cumsum(-1)
    total = cumulative[-1:]
    place = torch.searchsorted(cumulative, uniform * total, right=True)
    # A place inside is one where the sum rose. Rounding can lead behind the end: the last such place is taken then.
    place = torch.minimum(place, torch.searchsorted(cumulative, total))
    token = int(place.where((total > 0) & total.isfinite(), -1))
    if token < 0:
        raise NotFinite(SCORES)
    return token


def without(probs: Tensor, token: int) -> Tensor:
    """`probs` [V] with `token` set to 0 and the rest normalised; all zero where no other token has probability."""
    left = probs.clone()
    left[token] = 0.0
    total = left.sum()
    return left / total.where(total > 0, 1.0)


def positive_part(values: Tensor, fallback: Tensor) -> Tensor:
    """The positive part, normalised. Nothing is left only where a rejection had probability zero."""
    positive = values.clamp(min=0.0)
    total = positive.sum()
    return torch.where(total > 0, positive / total, fallback)


def along(p: Tensor, path: Sequence[int]) -> Tensor:
    """Rows of p [num_nodes+1,V] at the root and along `path`: [len(path)+1,V]."""
    return p[[0, *(node + 1 for node in path)]]


RULES: dict[str, Rule] = {"greedy": Greedy(), "sampling": Sampling()}
