"""`draftsmith recipes` lists what ships with the project; `draftsmith show` prints a recipe as it would run."""

from __future__ import annotations

import argparse

import yaml

from ...core.errors import UserError
from ...core.json_types import JsonObject, value_at
from ...core.secrets import redact_tree
from ...core.section import within
from ..config.exit_codes import OK
from ..config.files import recipe_names
from ..config.launch import say
from ..config.load import Loaded, leave_at_once, load
from .command import NAME, SETTINGS, Argument, Command, recipe_arguments


def listing(words: tuple[str, ...] = ()) -> str:
    """A line for each recipe whose name or header holds all of `words`."""
    lines = {name: path.read_text().splitlines()[0].lstrip("# ") for name, path in recipe_names().items()}
    width = max(map(len, lines))
    rows = [f"  {name:<{width}}  {header}" for name, header in lines.items()]
    return "\n".join(line for line in rows if all(word.lower() in line.lower() for word in words))


def _list(given: argparse.Namespace) -> int:
    listed = listing(tuple(given.words))
    if not listed:
        raise UserError(f"no recipe with {' and '.join(given.words)}", hint="draftsmith recipes lists all")
    say(listed)
    return OK


LIST = Command(
    name="recipes",
    summary="list the recipes that ship with the project",
    description="List the recipes that ship with the project, one line each. The header of each file has the paper,\n"
    "the hardware, the expected numbers and the command.",
    examples=(
        ("draftsmith recipes", "all of them"),
        ("draftsmith recipes demo", "those that run on a CPU in minutes"),
        ("draftsmith recipes llamagen eagle", "recipes with both words in the name or the line"),
    ),
    arguments=(Argument("words", "only recipes with all of these words", {"nargs": "*", "metavar": "WORD"}),),
    run=_list,
    only_prints=True,
)


def _show(given: argparse.Namespace) -> int:
    leave_at_once()
    loaded = load(recipe_arguments(given))
    say(f"# {loaded.path}")
    say(shown(loaded, defaults=not given.no_defaults))
    return OK


def shown(loaded: Loaded, *, defaults: bool = True) -> str:
    """The recipe as YAML, which is a recipe again, without secrets."""
    tree = redact_tree(resolved(loaded) if defaults else loaded.tree)
    return yaml.safe_dump(tree, default_flow_style=None, width=120, allow_unicode=True, sort_keys=False).rstrip()


def resolved(loaded: Loaded) -> JsonObject:
    """Every setting of the checked recipe that something reads, defaults included."""
    from ...models.drafters.base import DrafterConfig  # help texts need no torch

    recipe = loaded.recipe
    tree = recipe.model_dump(mode="json", by_alias=True)
    for place, drafter in within(recipe, DrafterConfig):
        for name in drafter.unread_for_images if recipe.target.draws_images else drafter.unread_for_language:
            value_at(tree, *place).pop(type(drafter).model_fields[name].alias or name, None)
    return tree


SHOW = Command(
    name="show",
    summary="show a recipe as it would run",
    description="Print the whole recipe: its file, what it extends, the command line and all defaults. The output is\n"
    "a recipe, too: save it to a file, and it runs the same.",
    examples=(
        ("draftsmith show llava15-160m", "its own settings, those of llava15-68m, and all defaults"),
        ("draftsmith show llava15-160m --no-defaults", "without the defaults"),
        ("draftsmith show demo/lvlm seed=3 > mine.yaml", "a recipe of your own: draftsmith train mine.yaml"),
    ),
    arguments=(
        NAME,
        SETTINGS,
        Argument("--no-defaults", "leave out defaults", {"action": "store_true"}),
    ),
    run=_show,
    only_prints=True,
)
