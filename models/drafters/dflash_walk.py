"""What a block proposes in a cycle: place by place, or node by node where a place reads the tokens before it.

DFlash's places know the last committed token alone, so that one distribution stands for a level of a tree. DSpark's and
DFlash 2's know the drafted token before them: after the one pass of the backbone a walk asks each node for its own
distribution, which costs a look-up and a small product. What is drawn at a node is drawn from what the walk answers
there, so that chains and trees of any shape are exact as EAGLE's are.
Letters: R rows, F nodes, S answered nodes, K places that answer, D width, N width of a state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...core.states import uploaded
from ..decoding.rows import Guidance
from ..decoding.tree import ROOT, Expansions
from ..decoding.warp import Warp

Reduce = Callable[[Tensor], Tensor]  # guidance over what the rows add to scores


class Before(NamedTuple):
    """What stands before places: [...] ids each."""

    tokens: Tensor  # int64, the token before each
    above: Tensor | None = None  # int64, the code above it in a picture, -1 where none is; None: not read

    def at(self, index: tuple[Tensor, ...]) -> Before:
        """The same of some places."""
        return Before(self.tokens[index], None if self.above is None else self.above[index])


class Conditional(Protocol):
    """A draft whose places read the token before them."""

    def conditioned(
        self, scores: Tensor, outputs: Tensor, before: Before, state: Tensor | None, reduce: Reduce
    ) -> tuple[Tensor, Tensor | None]:
        """Scores [F,V] of nodes given what stands before them, and what their children carry on [R,F,N].

        Args:
            scores: [F,V] without it.
            outputs: [R,F,D] of the backbone at each node's place.
            state: [R,F,N] that each node's parent carried on; None: a block begins, or nothing is carried.
            reduce: [R,F,...] of the rows -> [F,...] as guidance joins them.
        """
        ...


class Levels:
    """One distribution for each place, whatever stands before it.

    Args:
        scores: [K,V].
    """

    def __init__(self, scores: Tensor, warp: Warp):
        self.q, self._expansions = warp.apply_temperature(scores), Expansions()

    def root(self) -> Tensor:
        """q [V] of the first place."""
        return self.q[0]

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Return q [F,V] by the depth of each node; `tokens` are not read."""
        return self.q[_places(self._expansions.take(parents), self.q.device)]


class Walk:
    """A distribution for each node, given the tokens on its path.

    Args:
        scores: [K,V] guided, without what stands before a place.
        outputs: [R,K,D] of the backbone.
        first: [1] the last committed token.
        above: [K] codes above the places, as of `Before`.
        step: the number of the answer's token that the first place scores, for guidance.
    """

    def __init__(
        self, head: Conditional, scores: Tensor, outputs: Tensor, warp: Warp, first: Tensor, guidance: Guidance,
        *, above: Tensor | None = None, step: int = 0,
    ):  # fmt: skip
        self._head, self._scores, self._outputs, self._warp = head, scores, outputs, warp
        self._first, self._guidance, self._above, self._step = first, guidance, above, step
        self._expansions = Expansions()
        self._states: Tensor | None = None  # [R,1+S,N] that the root's answer and each expansion carry on

    @torch.inference_mode()
    def root(self) -> Tensor:
        """q [V] of the first place, after the last committed token."""
        return self._answer([0], self._first, None)[0]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """q [F,V] after `tokens` [F], each on its parent's path."""
        depths, state = self._expansions.take(parents), None
        if self._states is not None:
            carried = torch.tensor([parent - ROOT for parent in parents])  # the root's stands first
            state = self._states[:, uploaded(carried, self._scores.device)]
        return self._answer(depths, tokens, state)

    def _answer(self, depths: list[int], tokens: Tensor, state: Tensor | None) -> Tensor:
        device = self._scores.device
        places, steps = _places(depths, device), [self._step + depth for depth in depths]
        before = Before(uploaded(tokens, device), None if self._above is None else self._above[places])
        scores, carried = self._head.conditioned(
            self._scores[places], self._outputs[:, places], before, state,
            lambda rows: self._guidance(rows, steps, banned=False),
        )  # fmt: skip
        if carried is not None:
            self._states = carried if self._states is None else torch.cat([self._states, carried], dim=1)
        return self._warp.apply_temperature(scores)


def _places(depths: list[int], device: torch.device) -> slice | Tensor:
    """An index of places: a slice where there is one, of which nothing is gathered nor uploaded."""
    return slice(depths[0], depths[0] + 1) if len(depths) == 1 else uploaded(torch.tensor(depths), device)


def answers_of(
    head: Any, scores: Tensor, outputs: Tensor, warp: Warp, first: Tensor, guidance: Guidance,
    *, above: Tensor | None = None, step: int = 0,
) -> Levels | Walk:  # fmt: skip
    """A walk where the draft's places read the token before them, else levels; arguments as of `Walk`."""
    if not head.walks:
        return Levels(scores, warp)
    return Walk(head, scores, outputs, warp, first, guidance, above=above, step=step)


def likeliest_before(head: Any, scores: Tensor, outputs: Tensor, first: Tensor, guidance: Guidance) -> Before:
    """What stands before each place [K] on the likeliest path: known before any token is drawn."""
    if not head.walks:
        return Before(first.expand(len(scores)))
    walk, tokens = Walk(head, scores, outputs, Warp(), first, guidance), [first]
    q = walk.root()[None]
    for place in range(1, len(scores)):
        tokens.append(q.argmax(-1))
        q = walk.expand([place - 2], tokens[-1])
    return Before(torch.cat(tokens))
