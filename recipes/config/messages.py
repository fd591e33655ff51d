"""pydantic's errors as one message: the file or the command line, and the key of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...core.errors import Refused, UserError, did_you_mean, nearest, shown_value
from ...core.json_types import JsonObject, object_at, parts
from ...core.secrets import redact_argument, redact_tree
from .files import KEYS

_MOST = 8  # problems that a message names


@dataclass(frozen=True)
class Written:
    """A recipe as it is written: its file, (dotted key, text) of the command line, and the tree of both."""

    path: Path
    settings: Sequence[tuple[str, str]]
    tree: JsonObject

    def place(self, key: str) -> str:
        """Where the value of a key stands: on the command line, or in the file."""
        for setting, text in reversed(self.settings):
            if key and (f"{key}.".startswith(f"{setting}.") or setting.startswith(f"{key}.")):
                return "command line: " + redact_argument(f"{setting}={shown_value(text)}")
        return str(self.path)


@contextmanager
def blamed(written: Written) -> Iterator[None]:
    """Errors that name a key of the recipe also say where it is written."""
    try:
        yield
    except UserError as error:
        raise placed(error, written) from error


def placed(error: UserError, written: Written) -> UserError:
    """The error of a section, which knows its key and not where that is written."""
    key = error.key if error.key is not None and error.key.split(".")[0] in KEYS else None
    if error.where is not None and key is None:
        return error  # of a file of data, or of weights
    place = written.place(key or "")
    # The command line shows the key, or the problem does.
    if error.key is not None and "command line: " not in place and not error.begins_with_key:
        place = f"{place}, key {error.key}"
    where = place if error.where in (None, str(written.path)) else f"{error.where}; {place}"
    return UserError(_cut(error.problem), where=where, hint=_cut(error.hint or "") or None)


def _cut(message: str) -> str:
    """Without the middle of words that are longer than any path."""
    return re.sub(r"\S{260,}", lambda word: shown_value(word[0]), message)


def readable(error: ValidationError, tree: JsonObject, written: Written) -> UserError:
    """Pydantic's report as one message.

    Args:
        tree: what was validated.
    """
    errors = error.errors(include_url=False)
    # Of a key that takes a word or a section, what is wrong with a section says more than that it is no word.
    problems = [p for p in errors if not (p["type"].endswith("_type") and isinstance(p["input"], dict))] or errors
    keys: dict[str, list[str]] = {}  # of each text: one slip may stand at several
    hints: dict[str, None] = {}
    for problem in problems[:_MOST]:
        key, text, hint = _said(problem, tree)
        keys.setdefault(text, []).append(key)
        hints |= {hint: None} if hint else {}
    lines = [f"{', '.join(those) or 'the recipe'}: {text}" for text, those in keys.items()]
    lines += [f"and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
    return UserError(
        _cut("; ".join(lines)),
        where="; ".join(dict.fromkeys(written.place(key) for those in keys.values() for key in those)),
        hint=_cut("; ".join(hints)) or "write another value; draftsmith show NAME prints every key of the recipe",
    )


def _said(problem: Any, tree: JsonObject) -> tuple[str, str, str | None]:
    """One problem: its key, what is wrong, and what to do."""
    kind, context = problem["type"], problem.get("ctx", {})
    key, message = _key(problem["loc"], tree, kind == "missing"), problem["msg"]
    match kind:
        case "value_error" if isinstance(refused := context["error"], Refused):
            return ".".join(part for part in (key, refused.key) if part), refused.problem, refused.hint
        case "value_error":
            message = str(context["error"])
        case "missing":
            return key, "is missing", None
        case "union_tag_invalid":
            kinds = re.findall(r"'([^']*)'", context["expected_tags"])
            return f"{key}.kind", message, did_you_mean(shown_value(context["tag"]), kinds)
        case "union_tag_not_found":
            *above, name = key.split(".")
            near = nearest(name, [other for other in object_at(tree, *above) or {} if other != name], 1)
            meant = "".join(f"did you mean {'.'.join([*above, other])}? " for other in near)
            return key, "its kind is missing", f"{meant}a new one says its kind"
    # Of a whole section the message says enough.
    value = redact_tree(problem["input"])
    shown = "" if object_at(value) is not None else f" (found {shown_value(repr(value))})"
    return key, f"{message[0].lower()}{message[1:]}{shown}", None


def _key(places: Sequence[int | str], tree: object, is_missing: bool) -> str:
    """The dotted key of pydantic's place, which also has the kinds of sections and the types of values."""
    keys = []
    for number, place in enumerate(places):
        inside = {str(name): value for name, value in parts(tree)}
        if str(place) in inside:
            tree = inside[str(place)]
            keys.append(shown_value(str(place)))
        elif is_missing and number == len(places) - 1:
            keys.append(str(place))
    return ".".join(keys)
