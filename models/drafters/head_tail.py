"""A trained head before Jacobi's tail: the window's first level is drawn from the mean of the head's distribution and
the stale one, the levels behind it from what the last pass computed.

A head is surest one code ahead, and the stale distributions need no pass of the drafter. No paper has it; exact as
Jacobi decoding (`jacobi.py`), since each level's q is known before its codes are drawn.
Letters: F nodes, V vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..decoding.warp import Warp
from ..targets.base import Target, TargetStep, Verified
from .base import PLAIN, Drafter, DraftingOptions
from .jacobi import JacobiConfig, JacobiProposal
from .mixed import MembersConfig


class HeadTailConfig(MembersConfig):
    """One drafter for the first level, Jacobi decoding for the others. Takes Jacobi's trees, rules and draws."""

    kind: Literal["head_tail"]
    for_language: ClassVar[bool] = False

    # One name of a stage that trained a head.
    members: tuple[Any, ...] = Field(min_length=1, max_length=1)
    tail: JacobiConfig = JacobiConfig(kind="jacobi")
    # Weight of the stale distribution in the first level's mean; 0: the head alone.
    stale: float = Field(0.5, ge=0, le=1)

    def drafter(self, module: Any, target: Target, options: DraftingOptions = PLAIN) -> HeadTailProposal:
        """`module` holds the head's proposal, as an ensemble's."""
        (head,) = module
        return HeadTailProposal(head, self.tail.drafter(torch.nn.Module(), target), self.stale)


class HeadTailProposal:
    """Draws as Jacobi decoding, with another q at the root."""

    max_levels: int | None = None

    def __init__(self, head: Drafter, tail: JacobiProposal, stale: float):
        self.members, self._head, self._tail, self._stale = [head], head, tail, stale
        self.taps, self.choose, self.expand = head.taps, tail.choose, tail.expand

    def start(self, request: Any, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        self._head.start(request, prefill, warp, capacity=capacity)
        self._tail.start(request, prefill, warp, capacity=capacity)

    def begin(self, first: int) -> None:
        self._head.begin(first)
        self._tail.begin(first)

    def root(self) -> Tensor:
        """The mean [V]; the head's alone where the last pass computed nothing for this place."""
        stale, q = self._tail.root(), self._head.root()
        return torch.lerp(q, stale, self._stale) if self._tail.num_known else q

    def accept(self, verified: Verified) -> None:
        self._head.accept(verified)
        self._tail.accept(verified)
