"""Loads and checks a recipe: its files and `key=value` make a tree, and pydantic validates it.

Everything a user can get wrong ends as a `UserError` that names the file, the key and the hint, before anything is
allocated or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ...core.errors import UserError, did_you_mean, shown_value
from ...core.import_paths import ALLOW_IMPORT, NotImported
from ...core.interpolation import resolved
from ...core.json_types import Json, JsonObject, listed, object_at, walk
from ...core.secrets import redact_argument
from .files import (
    FOLDER,
    KEYS,
    find_named,
    find_recipe,
    is_published,
    merge,
    of_other_files,
    ordered,
    recipe_names,
    sources,
    value_of,
    with_bases,
)
from .messages import Written, blamed, readable
from .uncollected import uncollected

if TYPE_CHECKING:
    from .schema import Recipe

__all__ = ["FOLDER", "RUN_OPTIONS", "Loaded", "Options", "find_recipe", "load", "recipe_names", "sources"]
MOST = 10**15  # no setting counts further, and some of what reads it (NumPy, torch) counts in 64 bits
RUN_OPTIONS = ("recipe", "stages", "restart", "dry_run", "verbose", "allow_import")


@dataclass(frozen=True)
class Options:
    """What to do with a recipe; not part of it."""

    stages: tuple[str, ...] | None = None
    restart: str | None = None
    dry_run: bool = False
    verbose: bool = False  # whether DeepSpeed tells what it does
    allow_import: bool = False  # of modules that a published folder's recipe names


@dataclass(frozen=True)
class Loaded:
    """A checked recipe, its tree as it is written (`${...}` and all), its file, and the run's options."""

    recipe: Recipe
    tree: JsonObject
    path: Path
    options: Options
    written: Written


@dataclass(frozen=True)
class Words:
    """A command's words as they were read, before the schema looks at them: (dotted key, text), and with its value."""

    name: str
    path: Path
    tree: JsonObject
    settings: list[tuple[str, str]]
    options: Options
    overrides: list[tuple[str, Json]]


def read_words(arguments: Sequence[str]) -> Words:
    """`recipe=NAME key=value ...` without the schema, which brings torch. Raises `UserError`."""
    pairs = [_pair(argument) for argument in arguments]
    names = [value for key, value in pairs if key == "recipe"]
    if not names:
        raise UserError("give one recipe", hint="recipe=NAME: draftsmith recipes lists them")
    if len(names) > 1:
        raise UserError(f"{len(names)} recipes: {' and '.join(map(shown_value, names))}", hint="name one")
    path = find_recipe(names[0])
    tree = with_bases(path)
    options, overrides = _options(pairs, tree)
    return Words(names[0], path, tree, [pair for pair in pairs if pair[0] not in RUN_OPTIONS], options, overrides)


@uncollected()
def load(arguments: list[str]) -> Loaded:
    """Read `recipe=NAME key=value ...`. The schema brings torch and transformers: a moment's wait."""
    words = read_words(arguments)
    path, tree, options = words.path, words.tree, words.options
    for key, value in words.overrides:  # before all others, since `question_end` may be said before `path`
        _leave_other_files(tree, key, value)
    for key, value in words.overrides:
        _override(tree, key, value)
    written = Written(path, words.settings, ordered(tree, Path("command line")))
    published = any(is_published(place) for place, _ in sources(path))
    recipe = checked(written, imports=options.allow_import or not published)
    return Loaded(recipe, written.tree, path, options, written)


def checked(written: Written, *, imports: bool = True) -> Recipe:
    """The recipe of a tree. Raises `UserError` for what it cannot say.

    Args:
        imports: modules of other packages that its kinds name are imported. A published recipe does so by leave alone.
    """
    from .schema import Recipe

    with blamed(written):
        tree = resolved(written.tree)
        _check_keys_and_numbers(tree)
        try:
            return Recipe.model_validate(tree, context=ALLOW_IMPORT if imports else None)
        except ValidationError as error:
            raise readable(error, tree, written) from error
        except NotImported as error:
            hint = "a published folder imports nothing by itself: if you trust that package, allow_import=true"
            raise UserError(error.problem, where=str(written.path), hint=hint) from error


def _check_keys_and_numbers(tree: JsonObject) -> None:
    """Raises `UserError` for a key that is no text and a number that nothing counts to; inline configs are checked
    nowhere else.
    """
    for keys, value in walk(tree):
        key = ".".join(keys) or "the recipe"
        for name in value if isinstance(value, dict) else ():
            if not isinstance(name, str):
                raise UserError(f"{key} has the key {shown_value(name)}, which is no text", key=key, hint="quote it")
        if isinstance(value, int) and abs(value) > MOST:
            raise UserError(f"{key} is a number beyond {MOST:,}", key=key, hint="write a smaller one")


def _pair(argument: str) -> tuple[str, str]:
    key, sign, value = argument.partition("=")
    key = key.lstrip("-")
    if not sign or not all(key.split(".")):
        shown = redact_argument(argument)
        raise UserError(f"{shown!r} is not key=value", hint=setting_hint(shown))
    return key, value


def setting_hint(word: str) -> str:
    """How a word that looks like another tool's option is written here."""
    name = word.lstrip("-").partition("=")[0]
    meant = name.replace("-", "_")
    if meant in ("dry_run", "verbose"):
        return f"write {meant}=true"
    if not word.startswith("-") and find_named(name):
        return "name one recipe; settings are key=value"
    return f"write {meant if meant in RUN_OPTIONS else name}=VALUE without blanks, or in quotes"


def _options(pairs: list[tuple[str, str]], tree: JsonObject) -> tuple[Options, list[tuple[str, object]]]:
    values: JsonObject = {}
    overrides = []
    for key, text in pairs:
        value = value_of(key, text)
        if key in RUN_OPTIONS:
            values[key] = value
        elif (first := key.partition(".")[0]) not in KEYS:
            hint = did_you_mean(first, [*KEYS, *RUN_OPTIONS])
            raise UserError(
                f"unknown key {first}", where=f"command line: {redact_argument(f'{key}={text}')}", hint=hint
            )
        else:
            overrides.append((key, value))
    known = list(object_at(tree, "stages") or {})
    stages = values.get("stages")
    if stages is not None:
        chosen = [str(s) if isinstance(s, int) else s for s in listed(stages)]
        for stage in chosen:
            _known_stage(stage, known, "stages")
        if not chosen:
            raise UserError('"stages=[]" names no stage', hint="leave it out for all of them, or name some")
        stages = tuple(chosen)
    restart = values.get("restart")
    if restart is not None:
        _known_stage(restart, known, "restart")
    switches = {key: values.get(key, False) for key in ("dry_run", "verbose", "allow_import")}
    for key, switch in switches.items():
        if not isinstance(switch, bool):
            raise UserError(f"{key}={switch!r} is neither true nor false", hint=f"{key}=true")
    return Options(stages, restart, **switches), overrides


def _known_stage(stage: object, known: list[str], option: str) -> None:
    if stage not in known:
        said = shown_value(stage)
        hint = f'write "stages=[{said}]"' if "," in said and option == "stages" else did_you_mean(said, known)
        raise UserError(f"{option} names {said!r}, which is no stage of this recipe", hint=hint,
                        where=f"command line: {option}={said}")  # fmt: skip


def _leave_other_files(tree: JsonObject, key: str, value: object) -> None:
    """Takes away what belongs to the files of the data section that `key` is in, if it names others."""
    *path, last = key.split(".")
    section = object_at(tree, *path) or {}
    for gone in of_other_files(section, {last: value}):
        section.pop(gone, None)


def _override(tree: JsonObject, key: str, value: object) -> None:
    *path, last = key.split(".")
    section: Json = tree
    for part in path:
        if object_at(section, part) is None:
            section[part] = {}
        section = section[part]
    if last == "kind" and section.get("kind") not in (None, value):
        section.clear()
    section[last] = merge({last: section.get(last)}, {last: value})[last]
