"""`draftsmith show`: a recipe as it would run, with where each value came from."""

from __future__ import annotations

import argparse

from ..launch import say
from ..load import load
from ..origins import shown
from .command import NAME, OK, SETTINGS, Argument, Command, recipe_arguments


def _run(given: argparse.Namespace) -> int:
    loaded = load(recipe_arguments(given))
    say(f"# {loaded.path}")
    say(shown(loaded, defaults=not given.no_defaults))
    return OK


COMMAND = Command(
    name="show",
    summary="show a recipe as it would run, with where each value came from",
    description="The recipe with its defaults, what it extends and the command line put together. Behind each value\n"
    "stands where it came from: a recipe's file, the recipe that it extends, the command line, or the default.\n"
    "The output is a recipe itself: saved to a file it runs the same.",
    examples=(
        ("draftsmith show llava15-160m", "what it sets, what llava15-68m sets, and all defaults"),
        ("draftsmith show llava15-160m --no-defaults", "only what somebody has set"),
        ("draftsmith show demo/lvlm seed=3 > mine.yaml", "a recipe of one's own: draftsmith train mine.yaml"),
    ),
    arguments=(NAME, SETTINGS, Argument("--no-defaults", "only what somebody has set", {"action": "store_true"})),
    run=_run,
    takes="recipe",
)
