"""What the decoding loop asks of a drafter. Slots number its expansions; ROOT is the last committed token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..decoding.warp import Warp
from ..targets.base import Taps, TargetStep


class Drafter(Protocol):
    """Letters: F nodes, V vocabulary. All q are after the temperature and before top-k and top-p."""

    taps: Taps
    max_levels: int | None  # levels that it can propose; None: any

    def start(self, request: Any, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        """Begin a request whose prompt the target has run; at most `capacity` tokens follow."""
        ...

    def begin(self, first: int) -> None:
        """Told the first token, which the target emitted after the prompt."""
        ...

    def root(self) -> Tensor:
        """q [V] of the token after the last committed one."""
        ...

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """q [F,V] after each of `tokens` [F], whose parents are earlier slots or ROOT. The F take the next slots.

        A drafter that cannot condition on drafted tokens (Medusa) answers by level.
        """
        ...

    def accept(self, verified: Any) -> None:
        """Told the outcome of the cycle: the accepted path, the bonus token and the target's states along it."""
        ...
