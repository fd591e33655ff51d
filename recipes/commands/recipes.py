"""`draftsmith recipes` lists what ships with the project; `draftsmith show` prints a recipe as it would run."""

from __future__ import annotations

import argparse

from ...core.errors import UserError
from ..launch import say
from ..load import load, recipe_names
from ..origins import shown
from .command import NAME, OK, SETTINGS, Argument, Command, recipe_arguments


def listing(words: tuple[str, ...] = ()) -> str:
    """A line for each recipe whose name or header holds all of `words`."""
    lines = {name: path.read_text().splitlines()[0].lstrip("# ") for name, path in recipe_names().items()}
    width = max(map(len, lines))
    rows = [f"  {name:<{width}}  {header}" for name, header in lines.items()]
    return "\n".join(line for line in rows if all(word.lower() in line.lower() for word in words))


def _list(given: argparse.Namespace) -> int:
    if given.names:
        say("\n".join(recipe_names()))
        return OK
    found = listing(tuple(given.words))
    if not found:
        raise UserError(f"no recipe with {' and '.join(given.words)}", hint="draftsmith recipes lists all")
    say(found)
    return OK


LIST = Command(
    name="recipes",
    summary="list the recipes that ship with the project",
    description="The recipes that ship with the project, one line each. Each file's header says what the paper does,\n"
    "the hardware, the expected numbers and the command.",
    examples=(
        ("draftsmith recipes", "all of them"),
        ("draftsmith recipes demo", "those that run on a CPU in minutes"),
        ("draftsmith recipes llamagen eagle", "with both words in name or headline"),
    ),
    arguments=(
        Argument("words", "only recipes whose name or headline has all of these", {"nargs": "*", "metavar": "WORD"}),
        Argument("--names", "names alone, one on a line", {"action": "store_true"}),
    ),
    run=_list,
)


def _show(given: argparse.Namespace) -> int:
    loaded = load(recipe_arguments(given))
    say(f"# {loaded.path}")
    say(shown(loaded, defaults=not given.no_defaults))
    return OK


SHOW = Command(
    name="show",
    summary="show a recipe as it would run, with where each value came from",
    description="The recipe with its defaults, what it extends and the command line put together. After each value\n"
    "stands where it came from: a recipe's file, the recipe that it extends, the command line, or the default.\n"
    "The output is a recipe itself: saved to a file it runs the same.",
    examples=(
        ("draftsmith show llava15-160m", "what it sets, what llava15-68m sets, and all defaults"),
        ("draftsmith show llava15-160m --no-defaults", "only what somebody has set"),
        ("draftsmith show demo/lvlm seed=3 > mine.yaml", "a recipe of one's own: draftsmith train mine.yaml"),
    ),
    arguments=(NAME, SETTINGS, Argument("--no-defaults", "only what somebody has set", {"action": "store_true"})),
    run=_show,
    takes="recipe",
)
