"""Clips of one moving object, described in two ways: facts from the first words on, or after an introduction.

A drafter that holds text alone (Sparrow's VATA) has what the target's states of text say. Where the answer opens with
facts, those states have had no words yet in which to gather them; after an introduction that never changes, they have.
"""

from __future__ import annotations

import random
from dataclasses import replace

from .scene import Object, sample_scene
from .wordings import Say

QUESTION = "What happens in the clip?"
LATE_QUESTION = "Tell the story of the clip."
# Alike in every answer: whoever has learned the language drafts it without having seen the clip.
INTRODUCTION = (
    "This clip shows the board of a scene, where one object moves on in a straight line, from place to place."
)


def moving(rng: random.Random, num_frames: int) -> list[Object]:
    """An object at its place in each frame, in a straight line from one place to another.

    The same draws make the same story at any number of frames: it only moves more slowly.
    """
    item = sample_scene(rng, 1).objects[0]
    row, column = divmod(rng.choice([cell for cell in range(9) if cell != 3 * item.row + item.column]), 3)
    return [
        replace(item, row=_between(item.row, row, part), column=_between(item.column, column, part))
        for part in (step / (num_frames - 1) for step in range(num_frames))
    ]


def told_early(steps: list[Object], say: Say) -> tuple[str, str]:
    """Question and answer, whose second word is a fact in the usual wording."""
    first, last = steps[0], steps[-1]
    lead = say("The", "A", "This", "Once a")
    on = say("moves on and stops at", "goes from there over the board and comes to")
    return QUESTION, f"{lead} {first.name} starts at the {first.place}, {on} the {last.place} of the board."


def told_late(steps: list[Object], say: Say) -> tuple[str, str]:
    """Question and answer, whose facts come after `INTRODUCTION`."""
    first, last = steps[0], steps[-1]
    lead, end = say("The", "A", "This", "That"), say("stops at", "comes to")
    return LATE_QUESTION, f"{INTRODUCTION} {lead} {first.name} starts at the {first.place} and {end} the {last.place}."


def _between(start: int, end: int, part: float) -> int:
    return start + round((end - start) * part)
