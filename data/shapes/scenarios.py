"""Questions about scenes and their true answers: one function for each kind of scenario.

The kinds follow the benchmarks of the papers (TABED, appendix I): captions, questions with reasons,
probes, words in pictures, several pictures, stories, and text without a picture. Each function maps
a seeded generator to one record's text and the scenes that go with it; `say` draws among right wordings.

Clips of one moving object are described in two ways. A drafter that holds text alone (Sparrow's VATA) has what the
target's states of text say: where the answer opens with facts, those states have had no words yet in which to gather
them; after an introduction that never changes, they have.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ...core.json_types import JsonObject
from .scene import COLORS, Object, Say, Scene, sample_scene

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


def _between(start: int, end: int, part: float) -> int:
    return start + round((end - start) * part)


Turns = list[tuple[str, str]]  # (question, answer)

WORDS = ("bird", "boat", "fish", "moon", "tree", "rain", "snow", "lamp", "ship", "goat", "wolf", "gold")
# Of a tale: what no picture and no word before tells.
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Frank", "Greta", "Henry", "Ida", "Jack")
TRAITS = ("small", "kind", "proud", "quiet", "brave", "clever", "shy", "happy", "lazy", "old")
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
    extra: JsonObject = field(default_factory=dict)  # answer keys for scoring
    frames: tuple[Scene, ...] = ()  # of a clip


def caption(rng: random.Random, say: Say) -> Scenario:
    """A description of one to three objects."""
    scene = sample_scene(rng, rng.randint(1, 3))
    return Scenario([("Describe the picture.", describe(scene, say))], (scene,))


def name(rng: random.Random, say: Say) -> Scenario:
    """One object alone: the easiest lesson in what colours and shapes look like."""
    scene = sample_scene(rng, 1)
    item = scene.objects[0].name
    lead = say("A", "It is a", "There is a", "You can see a", "This is a", "I see a", "We see one")
    return Scenario([("What is in the picture?", f"{lead} {item}.")], (scene,))


def attribute(rng: random.Random, say: Say) -> Scenario:
    """The colour or the shape of one of two or three objects, with a reason."""
    scene = sample_scene(rng, rng.randint(2, 3))
    turn, answer = _attribute_turn(rng, say, scene)
    return Scenario([turn], (scene,), {"answer": answer, "num_objects": len(scene.objects)})


def conversation(rng: random.Random, say: Say) -> Scenario:
    """Several questions about one picture, each about another object."""
    scene = sample_scene(rng, rng.randint(2, 3))
    objects = rng.sample(scene.objects, len(scene.objects))
    turns = [_attribute_turn(rng, say, scene, item)[0] for item in objects]
    return Scenario(turns, (scene,))


def colors(rng: random.Random, say: Say) -> Scenario:
    """The colours of all objects in an order that the picture does not give: each must be looked up by its shape."""
    scene = sample_scene(rng, rng.randint(2, 3))
    objects = rng.sample(scene.objects, len(scene.objects))
    answer = say(
        _listing([f"{o.shape} {o.color}" for o in objects]).capitalize() + ".",
        _listing([f"the {o.shape} is {o.color}" for o in objects]).capitalize() + ".",
        f"You can see that {_listing([f'the {o.shape} is {o.color}' for o in objects])}.",
        f"It shows {_listing([f'a {o.color} {o.shape}' for o in objects])}.",
        f"There is {_listing([f'a {o.color} {o.shape}' for o in objects])} on the board.",
        f"I see {_listing([f'one {o.color} {o.shape}' for o in objects])}.",
        f"We have {_listing([f'a {o.shape} in {o.color}' for o in objects])}.",
    )
    return Scenario([("Which color does each object have?", answer)], (scene,))


def probe(rng: random.Random, say: Say) -> Scenario:
    """A yes-or-no question about one object, as POPE asks."""
    scene = sample_scene(rng, rng.randint(2, 3))
    item = rng.choice(scene.objects)
    if rng.random() < 0.5:
        lead = say("Yes", "Right", "Sure", "Indeed")
        answer = say(
            f"there is a {item.name} at the {item.place}.", f"a {item.name} is at the {item.place} of the board."
        )
        return Scenario([(f"Is there a {item.name}?", f"{lead}, {answer}")], (scene,))
    color = rng.choice([c for c in sorted(COLORS) if c != item.color])
    lead = say("No", "Wrong", "Sorry", "Not so")
    answer = say(
        f"the {item.shape} is {item.color} and it is at the {item.place}.",
        f"there is a {item.name}, which is at the {item.place} of the board.",
    )
    return Scenario([(f"Is there a {color} {item.shape}?", f"{lead}, {answer}")], (scene,))


def count(rng: random.Random, say: Say) -> Scenario:
    """The number of objects, and their names."""
    scene = sample_scene(rng, rng.randint(1, 4))
    names = _listing([o.name for o in scene.objects])
    noun = "object" if len(scene.objects) == 1 else "objects"
    verb = "is" if len(scene.objects) == 1 else "are"
    lead = say(f"There {verb}", "You can count", "I see", "The picture has", "We count")
    tail = say(f"in the picture: {names}.", f"on the board of the picture, namely {names}.")
    answer = f"{lead} {NUMBERS[len(scene.objects)]} {noun} {tail}"
    return Scenario([("How many objects are in the picture?", answer)], (scene,))


def place(rng: random.Random, say: Say) -> Scenario:
    """The place and colour of one object."""
    scene = sample_scene(rng, rng.randint(2, 3))
    item = rng.choice(scene.objects)
    lead = say(
        f"The {item.shape} is", "It is", f"You can see the {item.shape}", f"I see the {item.shape}", "This one is"
    )
    tail = say(f"and its color is {item.color}.", f"where there is a {item.name} and nothing else.")
    return Scenario([(f"Where is the {item.shape}?", f"{lead} at the {item.place} of the board {tail}")], (scene,))


def word(rng: random.Random, say: Say) -> Scenario:
    """A written word to read."""
    text = rng.choice(WORDS)
    lead = say("The word in the picture is", "You can read", "It says", "I read", "This is the word")
    tail = say("and it is written in black letters.", "which is a word of four letters, all of them black.")
    answer = f"{lead} {text}, {tail}"
    return Scenario([("Which word is written in the picture?", answer)], (Scene((), text),))


def difference(rng: random.Random, say: Say) -> Scenario:
    """Two pictures that differ in the colour of one object."""
    first, second, item, color = _recolored(rng)
    before, after = f"{item.color} in the first picture", f"{color} in the second picture"
    answer = say(
        f"The {item.shape} is {before} and {after}",
        f"It is the {item.shape}, which is {before} and {after}",
        f"You can see that the {item.shape} is {before} and {after}",
        f"I see a {item.shape} that is {before} and {after}",
        f"Only the {item.shape} is not the same, as it is {before} and {after}",
    ) + say(".", ", and nothing else is different.")
    return Scenario([("What is the difference between the two pictures?", answer)], (first, second))


def edit(rng: random.Random, say: Say) -> Scenario:
    """The same pair; the answer is the instruction that turns the first picture into the second."""
    first, second, item, color = _recolored(rng)
    question = "Which edit turns the first picture into the second picture?"
    answer = say(
        f"Change the color of the {item.shape} from {item.color} to {color}",
        f"Paint the {item.color} {item.shape} in {color}",
        f"Turn the {item.color} {item.shape} into a {color} {item.shape}",
        f"Give the {item.color} {item.shape} the color {color}",
        f"Take the {item.color} {item.shape} and make it {color}",
    ) + say(".", ", and leave all the rest as it is.")
    return Scenario([(question, answer)], (first, second))


def story(rng: random.Random, say: Say) -> Scenario:
    """Five pictures in which one object walks over the board."""
    scene = sample_scene(rng, 1)
    item = scene.objects[0]
    row = rng.randrange(3)
    steps = [replace(item, row=row, column=column) for column in (0, 1, 2, 1, 0)]
    question = "Tell the story of the five pictures."
    lead = say("The", "A", "This", "Once a")
    back = say("and then it walks back to", "where it turns and comes back to")
    answer = (
        f"{lead} {item.name} starts at the {steps[0].place}, walks to the {steps[2].place}, "
        f"{back} the {steps[4].place}."
    )
    return Scenario([(question, answer)], tuple(Scene((step,)) for step in steps))


def clip(rng: random.Random, say: Say, num_frames: int = 4) -> Scenario:
    """An object that moves in a straight line from one place to another; the answer's second word is a fact in the
    usual wording.
    """
    steps = moving(rng, num_frames)
    lead = say("The", "A", "This", "Once a")
    on = say("moves on and stops at", "goes from there over the board and comes to")
    answer = f"{lead} {steps[0].name} starts at the {steps[0].place}, {on} the {steps[-1].place} of the board."
    return Scenario([(QUESTION, answer)], frames=tuple(Scene((step,)) for step in steps))


def clip_late(rng: random.Random, say: Say, num_frames: int = 4) -> Scenario:
    """The same kind of clip; the facts come after an introduction that never changes."""
    steps = moving(rng, num_frames)
    lead, end = say("The", "A", "This", "That"), say("stops at", "comes to")
    facts = f"{lead} {steps[0].name} starts at the {steps[0].place} and {end} the {steps[-1].place}."
    return Scenario([(LATE_QUESTION, f"{INTRODUCTION} {facts}")], frames=tuple(Scene((step,)) for step in steps))


def sums(rng: random.Random, say: Say) -> Scenario:
    """A sum of two small numbers, without a picture."""
    a, b = rng.randint(0, 3), rng.randint(0, 3)
    question = f"What is {NUMBERS[a]} plus {NUMBERS[b]}?"
    first, second, result = NUMBERS[a], NUMBERS[b], NUMBERS[a + b]
    answer = say(
        f"If you add {first} and {second}, the sum is {result}",
        f"The sum of {first} and {second} is {result}",
        f"You get {result}",
        f"It is {result}",
        f"We add {first} and {second} and get {result}",
    ) + say(".", f", and {first} plus {second} is never anything else.")
    return Scenario([(question, answer)])


def tale(rng: random.Random, say: Say) -> Scenario:
    """A story whose frame is always the same, with names and adjectives that nothing foretells."""
    scene = sample_scene(rng, 1)
    item = scene.objects[0]
    names, traits = rng.sample(NAMES, 4), rng.sample(TRAITS, 4)
    answer = (
        f"Once upon a time there was a {item.name} at the {item.place} of the board. It had four friends, and they "
        f"were called {_listing(names)}. All of them said that the {item.name} was {_listing(traits)}, "
        f"and so it lived happily at the {item.place} of the board ever after."
    )
    return Scenario([("Tell a tale about the picture.", answer)], (scene,))


def aside(rng: random.Random, say: Say) -> Scenario:
    """A question that the picture beside it does not help with."""
    return replace(rng.choice((sums, fact))(rng, say), scenes=(sample_scene(rng, rng.randint(1, 3)),))


def fact(rng: random.Random, say: Say) -> Scenario:
    """A fact about shapes, without a picture."""
    question, answer = rng.choice(FACTS)
    lead = say("", "Good question. ", "Sure. ", "That is easy. ", "Let us see. ", "I can tell you. ")
    return Scenario([(question, lead + answer + say("", " This holds for every picture that there is."))])


KINDS: dict[str, Callable[[random.Random, Say], Scenario]] = {
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
        clip_late,
        tale,
        sums,
        fact,
        aside,
    )
}
OF_CLIPS = {f.__name__: f for f in (clip, clip_late)}  # those with a number of frames
WITHOUT_PICTURES = frozenset({"sums", "fact"})
TEXT_ONLY = WITHOUT_PICTURES | {"aside"}  # answers that no picture changes


def describe(scene: Scene, say: Say) -> str:
    """Usually place first: a reader (and a small model) can then look there and say what it sees."""
    places_first = _listing([f"at the {o.place} there is a {o.name}" for o in scene.objects])
    objects_first = _listing([f"a {o.name} at the {o.place}" for o in scene.objects])
    return say(
        f"{places_first.capitalize()}.",
        f"You can see that {places_first}.",
        f"It shows {objects_first} of the board.",
        f"There is {objects_first} of the board.",
        f"I see {objects_first} of the board.",
        f"We look and see that {places_first}.",
    )


def _attribute_turn(
    rng: random.Random, say: Say, scene: Scene, item: Object | None = None
) -> tuple[tuple[str, str], str]:
    item = item or rng.choice(scene.objects)
    if rng.random() < 0.75:
        claim = say(
            f"The {item.shape} is {item.color}",
            f"It is {item.color}",
            f"You can see that the {item.shape} is {item.color}",
            f"I see a {item.color} {item.shape}",
            f"This {item.shape} is {item.color}",
        )
        reason = say(
            f"because the object at the {item.place} is a {item.name}.",
            f"as there is a {item.name} at the {item.place} of the board.",
        )
        return (f"What color is the {item.shape}?", f"{claim}, {reason}"), item.color
    claim = say(
        f"The object is a {item.shape}",
        f"It is a {item.shape}",
        f"You can see a {item.shape}",
        f"I see a {item.shape}",
        f"This is a {item.shape}",
    )
    reason = say(
        f"because there is a {item.name} at the {item.place}.",
        f"as the object at the {item.place} of the board is a {item.name}.",
    )
    return (f"What is at the {item.place}?", f"{claim}, {reason}"), item.shape


def _recolored(rng: random.Random) -> tuple[Scene, Scene, Object, str]:
    scene = sample_scene(rng, 2)
    index = rng.randrange(2)
    item = scene.objects[index]
    color = rng.choice([c for c in sorted(COLORS) if c != item.color])
    objects = tuple(replace(o, color=color) if i == index else o for i, o in enumerate(scene.objects))
    return scene, Scene(objects), item, color


def _listing(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
