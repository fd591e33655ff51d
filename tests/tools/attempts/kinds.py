"""All kinds of attempts, and how often each is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attempts.attempt import Attempt
from attempts.damages import damage, half
from attempts.disks import disk
from attempts.engine_answers import engine_answers
from attempts.kills import kill
from attempts.manifests import manifests
from attempts.places import place
from attempts.publications import publication, reading
from attempts.recipes import recipe
from attempts.records import pictures, records
from attempts.stopped_ranks import stopped
from attempts.two_ranks import launch, ranks
from attempts.unlike_ranks import unlike


@dataclass(frozen=True)
class Kind:
    """A kind of attempt.

    Args:
        attempt: tries once; returns how the project held, raises `Broken` where it did not.
        weight: its share of the attempts.
        needs: what the undisturbed runs must have for it.
    """

    attempt: Callable[[Attempt], str]
    weight: float
    needs: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {"kill": Kind(kill, 25), "ranks": Kind(ranks, 2.5), "launch": Kind(launch, 1),
                          "unlike": Kind(unlike, 4), "stopped": Kind(stopped, 3), "disk": Kind(disk, 9),
                          "damage": Kind(damage, 17), "half": Kind(half, 10), "reading": Kind(reading, 4),
                          "publication": Kind(publication, 5, ("publish",)),
                          "manifests": Kind(manifests, 6, ("publish",)), "engine-answers": Kind(engine_answers, 6),
                          "recipe": Kind(recipe, 12), "records": Kind(records, 6), "pictures": Kind(pictures, 5),
                          "place": Kind(place, 5)}  # fmt: skip
