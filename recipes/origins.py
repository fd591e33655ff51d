"""A resolved recipe with where each value came from: a file, the recipe that it extends, the command line, a default.

What is shown is YAML again: saved to a file it is a recipe that resolves to the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..core.json_types import Json, JsonObject, object_at, value_at
from ..core.secrets import redact_tree
from ..core.section import within
from .files import FOLDER, sources
from .load import Loaded

COMMAND_LINE, DEFAULT = "command line", "default"
Place = tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """One setting of a resolved recipe."""

    place: Place  # keys from the top
    value: Json  # a scalar, a list, or an empty section
    origin: str


def resolved(loaded: Loaded) -> JsonObject:
    """Every setting of the checked recipe that something reads, defaults included, without secrets."""
    from ..models.drafters.base import DrafterConfig  # help texts need no torch

    recipe = loaded.recipe
    tree = recipe.model_dump(mode="json", by_alias=True)
    for place, drafter in within(recipe, DrafterConfig):
        for name in drafter.unread(recipe.target.draws_images):
            value_at(tree, *place).pop(type(drafter).model_fields[name].alias or name, None)
    return redact_tree(recipe.written_over(tree))


def values(loaded: Loaded) -> list[Value]:
    """The settings in the order in which they are shown."""
    layers, tree = _layers(loaded), resolved(loaded)
    return [Value(place, value, _origin(place, loaded, layers)) for place, value in _leaves(tree)]


def _layers(loaded: Loaded) -> list[tuple[str, JsonObject]]:
    """(what a file is called, what it says), the nearest first."""
    *base, (path, own) = sources(loaded.path)
    return [(_file(path), own)] + [(f"extended {_file(p)}", tree) for p, tree in reversed(base)]


def _named(loaded: Loaded) -> list[Value]:
    """The settings that something named. A section that was named and left empty (`M: {}`) is one of them."""
    layers, overridden = _layers(loaded), []
    for value in values(loaded):
        above = (value.place[:n] for n in range(1, len(value.place)))
        empty = next((place for place in above if value_at(loaded.tree, *place) == {}), ())
        if value.origin != DEFAULT:
            overridden.append(value)
        elif empty and (not overridden or overridden[-1].place != empty):
            overridden.append(Value(empty, {}, _origin(empty, loaded, layers)))
    return overridden


def shown(loaded: Loaded, *, defaults: bool = True) -> str:
    """YAML with each value's origin after it.

    Args:
        defaults: also settings that nothing named.
    """
    found = values(loaded) if defaults else _named(loaded)
    lines: list[tuple[str, str]] = []
    before: Place = ()
    for value in found:
        same = 0
        while same < min(len(before), len(value.place) - 1) and before[same] == value.place[same]:
            same += 1
        for depth in range(same, len(value.place) - 1):
            lines.append((f"{'  ' * depth}{_scalar(value.place[depth])}:", ""))
        key = f"{'  ' * (len(value.place) - 1)}{_scalar(value.place[-1])}: "
        asks = value.place[-1] == "question_end" and value.value
        note = "; added to every question, null takes it away" if asks else ""
        lines.append((key + _scalar(value.value), value.origin + note))
        before = value.place[:-1]
    width = min(72, max(len(text) for text, _ in lines))
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in lines)


def _origin(place: Place, loaded: Loaded, layers: list[tuple[str, JsonObject]]) -> str:
    # A key that is not in the merged tree was never set, or went with another kind.
    if not _sets(loaded.tree, place):
        return DEFAULT
    for key, value in reversed(loaded.overrides):
        keys = tuple(key.split("."))
        shorter = min(len(keys), len(place))
        if keys[:shorter] == place[:shorter] and (len(place) <= len(keys) or _sets(value, place[len(keys) :])):
            return COMMAND_LINE
    return next((name for name, tree in layers if _sets(tree, place)), DEFAULT)


def _sets(tree: object, place: Place) -> bool:
    """Whether `tree` says what stands at `place`; a name that stands for a section says all that is in it."""
    for key in place:
        section = object_at(tree)
        if section is None:
            return True
        if key not in section:
            return False
        tree = section[key]
    return True


def _leaves(tree: JsonObject, place: Place = ()) -> Iterator[tuple[Place, object]]:
    for key, value in tree.items():
        if section := object_at(value):
            yield from _leaves(section, (*place, str(key)))
        else:
            yield (*place, str(key)), value


def _file(path: Path) -> str:
    return str(path.relative_to(FOLDER)) if path.is_relative_to(FOLDER) else str(path)


def _scalar(value: object) -> str:
    """A key or a value on one line, as YAML reads it back."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 30, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")
