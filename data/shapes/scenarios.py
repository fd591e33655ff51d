"""What is asked about scenes and what is true: one function per kind of scenario.

The kinds follow the benchmarks of the papers (TABED, appendix I): captions, questions with reasons,
probes, words in pictures, several pictures, stories, and text without a picture. Each function maps
a seeded generator to one record's text and the scenes that go with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .scene import COLORS, Object, Scene, sample_scene

Turns = list[tuple[str, str]]  # (question, answer)

WORDS = ("bird", "boat", "fish", "moon", "tree", "rain", "snow", "lamp", "ship", "goat", "wolf", "gold")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
FACTS = (
    ("How many sides does a square have?", "A square has four sides, and all four sides have the same length."),
    ("How many sides does a triangle have?", "A triangle has three sides, and the three sides meet in three corners."),
    ("Does a circle have corners?", "No, a circle has no corners, because it is round on every side."),
    ("How many points does the star have?", "The star has five points, and each point looks the same as the others."),
    ("What is the board of a scene?", "The board has three rows and three columns, so there are nine places on it."),
    ("What is a diamond?", "A diamond is a square that stands on one of its corners."),
    ("What is a cross?", "A cross is made of two bars that meet in the middle."),
    ("Which color is the background?", "The background of every scene is white, so that each object can be seen."),
)


@dataclass(frozen=True)
class Scenario:
    """One record: its turns, its pictures or clip, and answer keys for scoring."""

    turns: Turns
    scenes: tuple[Scene, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)  # answer keys for scoring
    frames: tuple[Scene, ...] = ()  # of a clip


def caption(rng: random.Random) -> Scenario:
    """A description of one to three objects."""
    scene = sample_scene(rng, rng.randint(1, 3))
    return Scenario([("Describe the picture.", describe(scene))], (scene,))


def name(rng: random.Random) -> Scenario:
    """One object alone: the easiest lesson in what colours and shapes look like."""
    scene = sample_scene(rng, 1)
    return Scenario([("What is in the picture?", f"A {scene.objects[0].name}.")], (scene,))


def attribute(rng: random.Random) -> Scenario:
    """The colour or the shape of one of two or three objects, with a reason."""
    scene = sample_scene(rng, rng.randint(2, 3))
    turn, answer = _attribute_turn(rng, scene)
    return Scenario([turn], (scene,), {"answer": answer, "num_objects": len(scene.objects)})


def conversation(rng: random.Random) -> Scenario:
    """Several questions about one picture, each about another object."""
    scene = sample_scene(rng, rng.randint(2, 3))
    objects = rng.sample(scene.objects, len(scene.objects))
    turns = [_attribute_turn(rng, scene, item)[0] for item in objects]
    return Scenario(turns, (scene,))


def colors(rng: random.Random) -> Scenario:
    """The colours of all objects in an order that the picture does not give: each must be looked up by its shape."""
    scene = sample_scene(rng, rng.randint(2, 3))
    objects = rng.sample(scene.objects, len(scene.objects))
    answer = _listing([f"{o.shape} {o.color}" for o in objects]).capitalize() + "."
    return Scenario([("Which color does each object have?", answer)], (scene,))


def probe(rng: random.Random) -> Scenario:
    """A yes-or-no question about one object, as POPE asks."""
    scene = sample_scene(rng, rng.randint(2, 3))
    item = rng.choice(scene.objects)
    if rng.random() < 0.5:
        return Scenario([(f"Is there a {item.name}?", f"Yes, there is a {item.name} at the {item.place}.")], (scene,))
    color = rng.choice([c for c in sorted(COLORS) if c != item.color])
    answer = f"No, the {item.shape} is {item.color} and it is at the {item.place}."
    return Scenario([(f"Is there a {color} {item.shape}?", answer)], (scene,))


def count(rng: random.Random) -> Scenario:
    """The number of objects, and their names."""
    scene = sample_scene(rng, rng.randint(1, 4))
    names = _listing([o.name for o in scene.objects])
    noun = "object" if len(scene.objects) == 1 else "objects"
    verb = "is" if len(scene.objects) == 1 else "are"
    answer = f"There {verb} {NUMBERS[len(scene.objects)]} {noun} in the picture: {names}."
    return Scenario([("How many objects are in the picture?", answer)], (scene,))


def place(rng: random.Random) -> Scenario:
    """The place and colour of one object."""
    scene = sample_scene(rng, rng.randint(2, 3))
    item = rng.choice(scene.objects)
    answer = f"The {item.shape} is at the {item.place} of the board and its color is {item.color}."
    return Scenario([(f"Where is the {item.shape}?", answer)], (scene,))


def word(rng: random.Random) -> Scenario:
    """A written word to read."""
    text = rng.choice(WORDS)
    answer = f"The word in the picture is {text}, and it is written in black letters."
    return Scenario([("Which word is written in the picture?", answer)], (Scene((), text),))


def difference(rng: random.Random) -> Scenario:
    """Two pictures that differ in the colour of one object."""
    first, second, item, color = _recolored(rng)
    answer = f"The {item.shape} is {item.color} in the first picture and {color} in the second picture."
    return Scenario([("What is the difference between the two pictures?", answer)], (first, second))


def edit(rng: random.Random) -> Scenario:
    """The same pair; the answer is the instruction that turns the first picture into the second."""
    first, second, item, color = _recolored(rng)
    question = "Which edit turns the first picture into the second picture?"
    return Scenario(
        [(question, f"Change the color of the {item.shape} from {item.color} to {color}.")], (first, second)
    )


def story(rng: random.Random) -> Scenario:
    """Five pictures in which one object walks over the board."""
    scene = sample_scene(rng, 1)
    item = scene.objects[0]
    row = rng.randrange(3)
    steps = [replace(item, row=row, column=column) for column in (0, 1, 2, 1, 0)]
    question = "Tell the story of the five pictures."
    answer = (
        f"The {item.name} starts at the {steps[0].place}, walks to the {steps[2].place}, "
        f"and then it walks back to the {steps[4].place}."
    )
    return Scenario([(question, answer)], tuple(Scene((step,)) for step in steps))


def clip(rng: random.Random, num_frames: int = 4) -> Scenario:
    """An object that moves in a straight line from one place to another.

    The same draws make the same story at any number of frames: it only moves more slowly.
    """
    item = sample_scene(rng, 1).objects[0]
    row, column = divmod(rng.choice([cell for cell in range(9) if cell != 3 * item.row + item.column]), 3)
    steps = [
        replace(item, row=_between(item.row, row, part), column=_between(item.column, column, part))
        for part in (step / (num_frames - 1) for step in range(num_frames))
    ]
    answer = (
        f"The {item.name} starts at the {steps[0].place}, moves on and stops at the {steps[-1].place} of the board."
    )
    return Scenario([("What happens in the clip?", answer)], frames=tuple(Scene((step,)) for step in steps))


def sums(rng: random.Random) -> Scenario:
    """A sum of two small numbers, without a picture."""
    a, b = rng.randint(0, 3), rng.randint(0, 3)
    question = f"What is {NUMBERS[a]} plus {NUMBERS[b]}?"
    return Scenario([(question, f"If you add {NUMBERS[a]} and {NUMBERS[b]}, the sum is {NUMBERS[a + b]}.")])


def aside(rng: random.Random) -> Scenario:
    """A question that the picture beside it does not help with."""
    return replace(rng.choice((sums, fact))(rng), scenes=(sample_scene(rng, rng.randint(1, 3)),))


def fact(rng: random.Random) -> Scenario:
    """A fact about shapes, without a picture."""
    return Scenario([rng.choice(FACTS)])


KINDS: dict[str, Callable[[random.Random], Scenario]] = {
    f.__name__: f
    for f in (
        name,
        caption,
        attribute,
        conversation,
        colors,
        probe,
        count,
        place,
        word,
        difference,
        edit,
        story,
        clip,
        sums,
        fact,
        aside,
    )
}
WITHOUT_PICTURES = frozenset({"sums", "fact"})
TEXT_ONLY = WITHOUT_PICTURES | {"aside"}  # answers that no picture changes


def describe(scene: Scene) -> str:
    """Place first: a reader (and a small model) can then look there and say what it sees."""
    parts = [f"at the {o.place} there is a {o.name}" for o in scene.objects]
    return _listing(parts).capitalize() + "."


def _attribute_turn(rng: random.Random, scene: Scene, item: Object | None = None) -> tuple[tuple[str, str], str]:
    item = item or rng.choice(scene.objects)
    if rng.random() < 0.75:
        answer = f"The {item.shape} is {item.color}, because the object at the {item.place} is a {item.name}."
        return (f"What color is the {item.shape}?", answer), item.color
    answer = f"The object is a {item.shape}, because there is a {item.name} at the {item.place}."
    return (f"What is at the {item.place}?", answer), item.shape


def _recolored(rng: random.Random) -> tuple[Scene, Scene, Object, str]:
    scene = sample_scene(rng, 2)
    index = rng.randrange(2)
    item = scene.objects[index]
    color = rng.choice([c for c in sorted(COLORS) if c != item.color])
    objects = tuple(replace(o, color=color) if i == index else o for i, o in enumerate(scene.objects))
    return scene, Scene(objects), item, color


def _between(start: int, end: int, part: float) -> int:
    return start + round((end - start) * part)


def _listing(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
