"""What a cycle's verification came to, which policies learn from: the accepted path and the target's own token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import Tensor

from ..decoding.tree import Tree
from .base import TargetStep


@dataclass(frozen=True)
class Verified:
    """The outcome of a cycle."""

    path: tuple[int, ...]  # accepted nodes from the root down
    tokens: tuple[int, ...]  # their tokens
    bonus: int  # the token after them, the target's own
    step: TargetStep | None = None  # what the target computed at the root and along the path
    tree: Tree | None = None
    scores: Tensor | None = None  # [N+1,V] the target's at the root and at all nodes, before the temperature
    ended: bool = False  # the bonus token is an end token that was drafted and accepted: nothing could follow it

    def until_end(self, eos_ids: Collection[int]) -> Verified:
        """Up to the first accepted end token, which takes the bonus token's place.

        TABED's released loop counts alike: a drafted end token saves no pass, for the target would have added it.
        """
        place = next((n for n, token in enumerate(self.tokens) if token in eos_ids), None)
        if place is None:
            return self
        return replace(self, path=self.path[:place], tokens=self.tokens[:place], bonus=self.tokens[place], ended=True)

    @property
    def num_accepted(self) -> int:
        """Drafted tokens accepted, without the bonus token: one less than the cycle emits."""
        return len(self.path)
