"""All kinds of attempts, and how often each is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attempts.attempt import Attempt
from attempts.damages import damage, half
from attempts.kills import kill


@dataclass(frozen=True)
class Kind:
    """A kind of attempt.

    Args:
        attempt: tries once; returns how the project held, raises `Broken` where it did not.
        weight: its share of the attempts.
    """

    attempt: Callable[[Attempt], str]
    weight: float


KINDS: dict[str, Kind] = {"kill": Kind(kill, 25), "damage": Kind(damage, 17), "half": Kind(half, 10)}
