"""Acceptance rules: pure functions of a tree, the target's distributions and uniform draws.

`p` is the target's, `q` the drafter's probability (LANTERN writes them the other way round).
Letters: N nodes without the root, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..core.finite import NotFinite, likeliest
from ..core.import_paths import Kinded
from ..core.states import uploaded
from ..models.decoding.tree import ROOT, Tree
from ..models.decoding.warp import Distributions
from ..models.targets.base import Verified

SCORES = "the scores that a token is drawn from"


class Rule(Protocol):
    """`uniforms` holds at least `num_nodes + 1` draws from [0,1); they are used from the front."""

    name: str

    def __call__(self, tree: Tree, p: Distributions, uniforms: Sequence[float]) -> Verified:
        """`p` [N+1,V], row 0 at the root: scores under greedy decoding, else probabilities."""
        ...


@dataclass(frozen=True)
class Codes:
    """The codebook that a rule may read, of a target whose tokens are an image's codes."""

    codebook: Tensor  # [C,D], which lies where p will
    offset: int = 0  # a token's id is its code + offset
    seed: int = 0  # of random neighbours
    folder: Path | None = None  # keeps the neighbour table


class RuleSection(Kinded):
    """A method's `rule`: its settings, and the rule that they make."""

    # Whether the output is distributed as plain decoding's. Reports call a rule relaxed that does not claim it.
    is_exact: ClassVar[bool] = False

    @property
    def caution(self) -> str | None:
        """The warning above temperature 0; None: none."""
        return None

    def check_codebook(self, num_codes: int) -> None:
        """Raise `UserError` for settings beyond a codebook of so many codes."""

    def build_for_codes(self, temperature: float, codes: Codes) -> Rule:
        """The rule at this temperature where the target's tokens are an image's codes."""
        return self.build(temperature)

    def build(self, temperature: float) -> Rule:
        """The rule at this temperature; 0: greedy decoding, where the rule is given scores."""
        raise NotImplementedError


class Greedy:
    """Accept a node whose token is the target's most likely one. Exact for greedy decoding."""

    name = "greedy"

    def __call__(self, tree: Tree, p: Tensor | Distributions, uniforms: Sequence[float] = ()) -> Verified:
        """`p` [N+1,V], row 0 at the root: probabilities or scores, only their largest entry counts."""
        best = likeliest(Distributions.of(p).whole())
        tokens, best_ids = read_with(tree, best)
        return _followed(tree, tokens, lambda node: best_ids[node + 1])


class Sampling:
    """Speculative sampling over a tree: the output is distributed as the target for any proposal whose children are
    chosen without a draw, or drawn from q in this order and none dropped by its token (`check_combination` of
    `policies/base.py` refuses others; enumerated in `tests/eval/test_exactness.py`).

    Where proposals are deterministic, each visited node draws its next token once, from p: a child with that token is
    accepted, and a token without a child is the bonus. Each child is so accepted with probability p, as if all had been
    tried in turn and the rejected ones taken out of p (EAGLE-2).

    Children sampled from q are tried in the order in which they were drawn. One is accepted with probability
    min(1, p/q); on rejection p becomes the normalised positive part of p - q, and the child leaves q, which is how the
    next one was drawn (without replacement). A child that q gives nothing is a point mass: accepted with probability p,
    and removed from p otherwise.
    """

    name = "sampling"

    def __call__(self, tree: Tree, p: Tensor | Distributions, uniforms: Sequence[float]) -> Verified:
        """`p` [N+1,V], row 0 at the root: warped probabilities.

        The host waits once for deterministic proposals. For sampled ones it waits once, once more for each sibling
        after a rejected one, and once for the bonus token. On a CPU, where it never waits, rows of p are made as they
        are visited.
        """
        p, draft_probs = Distributions.of(p), tree.draft_probs
        if draft_probs is None:
            return _drawn_from_p(tree, p, uniforms)
        draws = iter(uniforms)
        tokens, first = _at_tokens(tree, p)

        def trial(node: int) -> tuple[int | None, Tensor]:
            rest, children = p.row(node + 1), tree.children.get(node, ())
            q = draft_probs[tree.parent_rows[children[0]]] if children else rest
            for rank, child in enumerate(children):
                token = tokens[child]
                if rank == 0 and first:
                    mass, q_mass = first[child]
                else:
                    mass, q_mass = torch.stack([rest[token], q[token].to(rest)]).tolist()
                if float(next(draws)) < mass / (q_mass or 1.0):
                    return child, rest
                if q_mass > 0.0:
                    rest, q = positive_part(rest - q, rest), without(q, token)
                else:
                    # p is kept where this was its only token: rounding alone rejects that, and nothing else is left.
                    left = rest.clone()
                    left[token] = 0.0
                    rest = positive_part(left, rest)
            return None, rest

        return descend(tokens, draws, trial)


def _drawn_from_p(tree: Tree, p: Distributions, uniforms: Iterable[float]) -> Verified:
    """The path of the tokens that each visited node draws from p, one by one or at once for all nodes; a node at depth
    d draws with uniform d.
    """
    draws = iter(uniforms)
    if p.one_by_one:
        return _followed(tree, tree.tokens.tolist(), lambda node: inverse_cdf(p.row(node + 1), float(next(draws))))
    by_depth = [float(u) for u in itertools.islice(draws, tree.num_levels + 1)]
    by_node = torch.tensor([by_depth[0], *(by_depth[depth] for depth in tree.depths)], dtype=torch.float64)
    tokens, ids = read_with(tree, _at_uniforms(p.whole(), uploaded(by_node, p.device)))
    return _followed(tree, tokens, lambda node: ids[node + 1])


def _followed(tree: Tree, tokens: Sequence[int], after: Callable[[int], int]) -> Verified:
    """From the root down for as long as a child has the token that comes after its parent: -1 where there is none."""
    path, token = list[int](), after(ROOT)
    while match := [child for child in tree.children.get(path[-1] if path else ROOT, ()) if tokens[child] == token]:
        path.append(match[0])
        token = after(match[0])
    if token < 0:
        raise NotFinite(SCORES)
    return Verified(tuple(path), tuple(tokens[n] for n in path), token)


def _at_tokens(tree: Tree, p: Distributions) -> tuple[list[int], list[tuple[float, float]]]:
    """Each node's token, and p and q of the token as its first sibling meets them (none where p is read row by
    row).
    """
    if p.one_by_one or not tree.num_nodes:
        return tree.tokens.tolist(), []
    assert tree.draft_probs is not None
    n, ids = tree.num_nodes, tree.tokens.to(p.device)
    rows = torch.tensor([tree.parents, tree.parent_rows], device=p.device)
    target_probs, drawn = p.whole()[rows[0] + 1, ids].double(), tree.draft_probs[rows[1], ids].double()
    joined = torch.cat([ids.double(), target_probs, drawn]).tolist()  # the first synchronisation
    return [int(t) for t in joined[:n]], list(zip(joined[n : 2 * n], joined[2 * n :], strict=True))


# The children of a node tried in turn: the accepted one or None, and what the rejections before left of p.
Trial = Callable[[int], tuple[int | None, Tensor]]


def descend(tokens: Sequence[int], draws: Iterator[float], trial: Trial) -> Verified:
    """From the root down for as long as a child is accepted; the bonus is drawn from what the last rejections left.

    Args:
        tokens: of each node.
        draws: that `trial` draws from too.
    """
    path: list[int] = []
    accepted, rest = trial(ROOT)
    while accepted is not None:
        path.append(accepted)
        accepted, rest = trial(accepted)
    bonus = inverse_cdf(rest, float(next(draws)))
    return Verified(tuple(path), tuple(tokens[n] for n in path), bonus)


def inverse_cdf(probs: Tensor, uniform: float) -> int:
    """The token that a uniform draw falls on; one without probability is never returned. One synchronisation.

    Raises:
        NotFinite: there is no probability at all, or it is no number.
    """
    token = int(_at_uniforms(probs[None], torch.full((1,), uniform, dtype=torch.float64, device=probs.device)))
    if token < 0:
        raise NotFinite(SCORES)
    return token


def _at_uniforms(probs: Tensor, uniforms: Tensor) -> Tensor:
    """[N,V], float64 [N] -> [N] int64 tokens; -1 where a row has no probability at all, or it is no number."""
    cumulative = probs.double().cumsum(-1)
    total = cumulative[:, -1:]
    place = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
    # A place inside is one where the sum rose. Rounding can lead past the end: the last such place is taken then.
    place = torch.minimum(place, torch.searchsorted(cumulative, total.contiguous()))
    return place.where((total > 0) & total.isfinite(), -1)[:, 0]


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


def read_with(tree: Tree, ids: Tensor) -> tuple[list[int], list[int]]:
    """The tree's tokens, and `ids` [n] int64 of the device, on the host: one synchronisation for both."""
    if tree.tokens.device.type == "cpu":  # a policy that read them has left them there
        return tree.tokens.tolist(), ids.tolist()
    joined = torch.cat([tree.tokens.to(ids), ids]).tolist()
    return joined[: tree.num_nodes], joined[tree.num_nodes :]


RULES: dict[str, Rule] = {"greedy": Greedy(), "sampling": Sampling()}
