"""pydantic's errors as one message: the key, where it was set, the nearest known key, an example."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from ..core.errors import OTHER_NAMES, UserError, did_you_mean, nearest
from ..core.import_paths import Kinded
from ..core.json_types import JsonMapping, object_at, value_at
from ..core.refused import Refused
from ..core.secrets import redact_argument, redact_tree
from . import recipe_tree as trees
from .sections import SECTION, WORD, kinds, names, sections, walk

# A value of each type, where a key has no default to show.
_EXAMPLES: dict[Any, Any] = {float: 1e-4, int: 8, bool: True, str: "text"}
_MOST = 8  # problems that a message names
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_WRONG_TYPES = ("_type", "_parsing", "_from_float")


@dataclass(frozen=True)
class Asked:
    """What was asked for.

    Args:
        path: the recipe's file.
        settings: (dotted key, text) of the command line.
        tree: what the recipe's own files say.
        fields: key at the top -> annotation.
        options: keys of the command line that are no part of a recipe.
    """

    path: Path
    settings: Sequence[tuple[str, str]]
    tree: JsonMapping
    fields: Mapping[str, Any]
    options: Sequence[str]

    @property
    def stages(self) -> JsonMapping:
        """Name -> section, of the recipe's own files."""
        return object_at(self.tree, "stages") or {}

    def place(self, key: str) -> str:
        """Who set what is wrong at `key`: the command line, the file, or the file with what the command line adds."""
        for setting, text in reversed(self.settings):
            is_whole = f"{key}.".startswith(f"{setting}.")
            if is_whole or setting.startswith(f"{key}."):
                given = "command line: " + redact_argument(f"{setting}={trees.shown(text)}")
                return given if is_whole or not self._writes(key) else f"{self.path} with {given}"
        return str(self.path)

    def _writes(self, key: str) -> bool:
        """Whether the recipe's files have this key."""
        *path, last = key.split(".")
        return last in (object_at(self.tree, *path) or {})


@contextmanager
def blamed(asked: Asked) -> Iterator[None]:
    """Errors that name a key of the recipe also say who set it."""
    try:
        yield
    except UserError as error:
        raise placed(error, asked) from error


def placed(error: UserError, asked: Asked) -> UserError:
    """The error of a section, which knows its key and not who set it."""
    key = error.key
    is_ours = key is not None and key.split(".")[0] in asked.fields
    if error.where is not None and not is_ours:
        return error  # of a file of data, or of weights
    place = asked.place(key) if key is not None and is_ours else str(asked.path)
    # The key is what the command line shows, or the problem.
    shown = key is None or "command line: " in place or error.begins_with_key
    place = place if shown else f"{place}, key {key}"
    where = place if error.where in (None, str(asked.path)) else f"{error.where}; {place}"
    return UserError(_cut(error.problem), where=where, hint=_cut(error.hint or "") or None)


def _cut(message: str) -> str:
    """Without the middle of words that are longer than any path."""
    return re.sub(r"\S{260,}", lambda word: trees.shown(word[0]), message)


def readable(error: ValidationError, asked: Asked) -> UserError:
    """Pydantic's report as one message."""
    problems = _problems(error)
    told = [_told(problem, asked) for problem in problems[:_MOST]]
    hints = [(key, hint) for key, _, hint in told if hint]
    more = [f"and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
    return UserError(
        _cut("; ".join(_once([(key, line) for key, line, _ in told]) + more)),
        where="; ".join(dict.fromkeys(asked.place(key) for key, _, _ in told)),
        hint=_cut("; ".join(_once(hints)))
        or "write another value; draftsmith show NAME prints every key of the recipe",
    )


def _once(lines: Sequence[tuple[str, str]]) -> list[str]:
    """(key, "KEY: TEXT") -> the lines, in which keys with the same text stand before it together."""
    keys: dict[str, list[str]] = {}
    for key, line in lines:
        text = line.removeprefix(f"{key}: ")
        keys.setdefault(text, []).append(key if text != line else "")
    return [": ".join(part for part in (", ".join(filter(None, those)), text) if part) for text, those in keys.items()]


def _told(problem: Any, asked: Asked) -> tuple[str, str, str | None]:
    """One problem: its key, what is wrong, and what to do."""
    places = [str(p) for p in problem["loc"] if p != "[key]"]
    kept, found = walk(dict(asked.fields), places)
    key, context, message = ".".join(map(trees.shown, kept)), problem.get("ctx", {}), problem["msg"]
    possible = list(dict.fromkeys(kind for section in found for kind in kinds(section)))
    match problem["type"]:
        case "value_error" if isinstance(refused := context["error"], Refused):
            key = ".".join(part for part in (key, refused.key) if part)
            return key, f"{key}: {refused.problem}", refused.hint and f"{key}: {refused.hint}"
        case "value_error":
            message = str(context["error"])
        case "extra_forbidden":
            return key, f"unknown key {key}", f"{key}: {_known_key(places, asked)}"
        case "missing":
            example = _example(places, asked)
            return key, f"{key} is missing", example and f"{key}: {example}"
        case "union_tag_not_found":
            if stage := _stage_meant(kept, asked):
                hint = f"{key}: did you mean stages.{stage}? A new stage says its kind: {', '.join(possible)}"
                return key, f"{key}: the recipe has no such stage", hint
            said = f"{key}: its kind is missing; kinds are {', '.join(possible)}"
            return key, said, f"{key}: add kind, one of these"
        case "union_tag_invalid":
            tag = trees.shown(context["tag"])
            line = f"{key}.kind: {tag!r} is no kind; kinds are {', '.join(map(repr, possible))}"
            hint = did_you_mean(tag, possible) if nearest(tag, possible) else "write one of these"
            if any(issubclass(section, Kinded) for section in found):
                hint += "; a class of another package is MODULE:CLASS, as in my_package.hydra:HydraConfig"
            return f"{key}.kind", line, f"{key}.kind: {hint}"
    value = redact_tree(problem["input"])
    # Of a whole section the message says enough.
    shown = "" if object_at(value) is not None else f" (found {trees.shown(repr(value))})"
    is_bound = problem["type"] in _BOUNDS
    example = _example(places, asked) if is_bound or problem["type"].endswith(_WRONG_TYPES) else None
    return key, f"{key}: {message[0].lower()}{message[1:]}{shown}", example and f"{key}: {example}"


def _known_key(places: list[str], asked: Asked) -> str:
    """The key that an unknown one stands for."""
    name = places[-1]
    if not places[1:]:
        of_stages = [
            f"stages.{stage}.{name}" for stage, section in asked.stages.items() if name in _keys(section, asked)
        ]
        if of_stages:
            return f"did you mean {' or '.join(of_stages)}?"
        known = sorted([*asked.fields, *asked.options])
    else:
        known = sorted({n for m in walk(dict(asked.fields), places[:-1])[1] for n in names(m)})
    close = _inside(name, places, asked) or nearest(name, known)
    return f"did you mean {close[0]}?" if close else f"keys here are {', '.join(known)}"


def _inside(name: str, places: list[str], asked: Asked) -> list[str]:
    """Keys of this name (or what other tools call so) one section deeper: optim.lr for lr."""
    here = walk(dict(asked.fields), places[:-1])[1] if places[1:] else []
    others = OTHER_NAMES.get(name, ())
    wanted = (name,) if any(other in names(section) for section in here for other in others) else (name, *others)
    deeper = [
        f"{field.alias or key}.{one}"
        for section in here
        for key, field in section.model_fields.items()
        for inner in sections(field.annotation)
        for one in wanted
        if one in names(inner) and one not in names(section)
    ]
    return list(dict.fromkeys(deeper))


def _keys(stage: object, asked: Asked) -> set[str]:
    """Keys of a stage, by its kind."""
    kind = value_at(stage, "kind")
    return {n for section in sections(asked.fields["stages"]) if kind in kinds(section) for n in names(section)}


def _stage_meant(kept: list[str], asked: Asked) -> str | None:
    """The stage that a setting of the command line seems to mean, where it names none."""
    if len(kept) != 2 or kept[0] != "stages" or kept[1] in asked.stages:
        return None
    if not any(key.startswith(f"stages.{kept[1]}.") for key, _ in asked.settings):
        return None
    return next(iter(nearest(kept[1], asked.stages, 1)), None)


def _example(places: list[str], asked: Asked) -> str | None:
    """What could stand at a key that was given a value of another type."""
    while places and places[-1].isdigit():  # an item of a list
        places = places[:-1]
    if not places[1:]:
        return _written(places[0], _of_type(asked.fields[places[0]])) if places else None
    for section in walk(dict(asked.fields), places[:-1])[1]:
        for name, field in section.model_fields.items():
            if places[-1] in (name, field.alias):
                value = field.get_default(call_default_factory=True)
                value = _of_type(field.annotation) if value in (None, PydanticUndefined, [], {}) else value
                return _written(places[-1], value)
    return None


def _written(key: str, value: object) -> str | None:
    if not isinstance(value, float | int | str | list | tuple | dict):
        return None
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
    return f"write {key}={text}, for example"


def _of_type(annotation: object) -> object:
    if annotation in _EXAMPLES:
        return _EXAMPLES[annotation]
    if get_origin(annotation) is Literal:
        return get_args(annotation)[0]
    if get_origin(annotation) is list:
        item = _of_type(get_args(annotation)[0])
        return None if item is None else [item]
    if get_origin(annotation) in (dict, Mapping):
        item = _of_type(get_args(annotation)[1])
        return {"name": {} if item is None else item}
    return next((value for part in get_args(annotation) if (value := _of_type(part)) is not None), None)


def _problems(error: ValidationError) -> list[Any]:
    """Return the errors; of a key that takes a word or a section, only what was wrong with the one that was given."""
    errors = error.errors()
    kept = []
    for problem in errors:
        last, is_section = str(problem["loc"][-1]) if problem["loc"] else "", object_at(problem["input"]) is not None
        # A section without a kind stands under its class's name.
        is_named = problem["type"] == "model_type" and problem["ctx"]["class_name"] == last
        if (is_section and WORD.fullmatch(last)) or (not is_section and (SECTION.fullmatch(last) or is_named)):
            continue
        kept.append(problem)
    return kept or errors
