"""All kinds of attempts, and how often each is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attempts.attempt import Attempt
from attempts.damages import damage, half
from attempts.disks import disk
from attempts.kills import kill
from attempts.stopped_ranks import stopped
from attempts.two_ranks import launch, ranks
from attempts.unlike_ranks import unlike


@dataclass(frozen=True)
class Kind:
    """A kind of attempt.

    Args:
        attempt: tries once; returns how the project held, raises `Broken` where it did not.
        weight: its share of the attempts.
    """

    attempt: Callable[[Attempt], str]
    weight: float


KINDS: dict[str, Kind] = {"kill": Kind(kill, 25), "ranks": Kind(ranks, 2.5), "launch": Kind(launch, 1),
                          "unlike": Kind(unlike, 4), "stopped": Kind(stopped, 3), "disk": Kind(disk, 9),
                          "damage": Kind(damage, 17), "half": Kind(half, 10)}  # fmt: skip
