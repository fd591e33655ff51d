"""What JSON and YAML files hold: its types, readers that look at a value's shape, and the walk over a tree.

Values are text, numbers, booleans, null, lists and objects again. A file of our own is checked whole by a schema
(`core/files.py`); of what others wrote, such as a server's log, these readers take out what is used.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeGuard, TypeVar

T = TypeVar("T")

Json = Any  # a value in such a file, or a whole tree
JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]  # one that is only read
NO_NUMBER = "{} is no JSON (write null)"
# A string, which is passed over (`*+` keeps no place in it to go back to), or what Python alone takes for a number.
_NO_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*+"|(-?Infinity|NaN)')


class NotANumber(json.JSONDecodeError):
    """NaN or infinity, in a text that may be JSON otherwise."""


def parse(text: str | bytes, each: Callable[[list[tuple[str, Json]]], Json] | None = None) -> Json:
    """What a text of JSON holds; `each` makes an object of its pairs. Raises `ValueError`."""
    whole = text if isinstance(text, str) else text.decode(json.detect_encoding(text), "surrogatepass")

    def refuse(constant: str) -> NoReturn:
        place = next(match.start() for match in _NO_NUMBER.finditer(whole) if match[1])
        raise NotANumber(NO_NUMBER.format(constant), whole, place)

    try:
        return json.loads(whole, parse_constant=refuse, object_pairs_hook=each)
    except RecursionError as error:
        raise ValueError("too deep") from error


def nulls(value: object) -> Json:
    """The value with null, which JSON has, for NaN and infinity, which it has not."""
    return with_each(value, float, lambda number: number if math.isfinite(number) else None)


def value_at(tree: object, *keys: str) -> Json:
    """What stands at a path of keys, of a list its numbers; None: nothing, or something else is on the way."""
    for key in keys:
        match tree:
            case dict():
                tree = tree.get(key)
            case list() if key.isdecimal() and int(key) < len(tree):
                tree = tree[int(key)]
            case _:
                return None
    return tree


def object_at(tree: object, *keys: str) -> JsonObject | None:
    """The object at a path of keys, without keys the value itself; None: nothing is there, or something else."""
    value = value_at(tree, *keys)
    return value if isinstance(value, dict) else None


def list_at(tree: object, *keys: str) -> list[Json] | None:
    """The list there, as `object_at`."""
    value = value_at(tree, *keys)
    return value if isinstance(value, list) else None


def text_at(tree: object, *keys: str) -> str | None:
    """The text there, as `object_at`."""
    value = value_at(tree, *keys)
    return value if isinstance(value, str) else None


def all_are(values: object, kind: type[T]) -> TypeGuard[list[T]]:
    """Whether this is a list, and each of its values of one kind."""
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def listed(value: object) -> list[Json]:
    """The values where a file may have one or a list of them, or null."""
    return [*value] if isinstance(value, list | tuple) else [] if value is None else [value]


def parts(value: object) -> Iterable[tuple[Any, Json]]:
    """(key or number, value) of what an object or a list holds; of anything else nothing."""
    match value:
        case Mapping():
            return value.items()
        case list() | tuple():
            return enumerate(value)
    return ()


def walk(tree: object, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Json]]:
    """Every value of a tree with the keys and numbers that lead to it: the tree itself first, each before its parts."""
    yield place, tree
    for key, value in parts(tree):
        yield from walk(value, (*place, str(key)))


def with_each(tree: object, kind: type[T], change: Callable[[T], Json]) -> Json:
    """The tree with every value of one kind (text, numbers with a fraction) changed that is no key; tuples become
    lists.
    """
    match tree:
        case Mapping():
            return {key: with_each(value, kind, change) for key, value in tree.items()}
        case list() | tuple():
            return [with_each(value, kind, change) for value in tree]
    return change(tree) if isinstance(tree, kind) else tree


def flat(tree: object, key: str = "") -> JsonObject:
    """Dotted key -> value of a tree of objects; lists and empty objects are values."""
    if not isinstance(tree, Mapping) or not tree:
        return {key: tree}
    return {k: v for name, value in tree.items() for k, v in flat(value, f"{key}.{name}" if key else str(name)).items()}


def difference(held: object, wanted: object, name: str = "") -> tuple[str, Json, Json] | None:
    """The first field in which two JSON values differ, dotted, with both values."""
    if not (isinstance(held, dict) and isinstance(wanted, dict)):
        return None if held == wanted else (name, held, wanted)
    for key in [*wanted, *(k for k in held if k not in wanted)]:
        if (other := difference(held.get(key), wanted.get(key), f"{name}.{key}" if name else key)) is not None:
            return other
    return None
