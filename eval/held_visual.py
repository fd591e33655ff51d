"""How much of the visual input a head holds: the share that Sparrow's figure 1b draws its tau by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class HeldVisual:
    """The visual input that a head holds while it decodes.

    Args:
        drafter: whose head it is.
        share: of the visual tokens.
        by: whose attention chooses them, where some are left out.
    """

    drafter: str
    share: float
    by: Literal["last", "text"] | None = None
