"""`draftsmith recipes`: what ships with the project, one line each."""

from __future__ import annotations

import argparse

from ...core.errors import UserError
from ..launch import say
from ..load import recipe_names
from .command import OK, Argument, Command


def listing(words: tuple[str, ...] = ()) -> str:
    """A line for each recipe whose name or header holds all of `words`."""
    lines = {name: path.read_text().splitlines()[0].lstrip("# ") for name, path in recipe_names().items()}
    width = max(map(len, lines))
    shown = [f"  {name:<{width}}  {header}" for name, header in lines.items()]
    return "\n".join(line for line in shown if all(word.lower() in line.lower() for word in words))


def _run(given: argparse.Namespace) -> int:
    if given.names:
        say("\n".join(recipe_names()))
        return OK
    found = listing(tuple(given.words))
    if not found:
        raise UserError(f"no recipe with {' and '.join(given.words)}", cure="draftsmith recipes lists all")
    say(found)
    return OK


COMMAND = Command(
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
    run=_run,
)
