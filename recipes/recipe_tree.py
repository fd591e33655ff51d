"""Checks of a recipe's tree that do not depend on the schema: keys are text, numbers are finite, text can be printed.

Inline model configs and free-form values are checked nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..core.errors import UserError
from ..core.json_types import Json, object_at, walk
from ..core.secrets import redact, shortened

# More is no recipe: the largest that ships has 400 values on 7 levels.
MOST_VALUES, DEEPEST = 50_000, 40
MOST = 10**15  # no setting counts further, and some of what reads it (NumPy, torch) counts in 64 bits
LONGEST = 20_000
_SHOWN = 40


def check(tree: Json, place: Callable[[str], str]) -> None:
    """Raises `UserError` for the first value that cannot be meant.

    Args:
        place: dotted key -> where it is written.
    """
    for number, (keys, value) in enumerate(walk(tree)):
        key = ".".join(keys)
        if number > MOST_VALUES or len(keys) > DEEPEST:
            what = f"more than {MOST_VALUES:,} values" if number > MOST_VALUES else f"more than {DEEPEST} levels"
            raise UserError(f"the recipe has {what}", where=place(""), hint="no recipe needs so many")
        if (problem := _problem(value)) is not None:
            name = shown(key) or "the recipe"
            raise UserError(f"{name} {problem[0]}", where=place(key), hint=problem[1])
    stages = tree.get("stages")
    if stages is not None and object_at(stages) is None:
        raise UserError(f"stages is {shown(stages)}, and not a mapping of names to sections", where=place("stages"),
                        hint="write `stages:` and under it `NAME: {kind: ..., ...}` for each")  # fmt: skip


def shown(value: object) -> str:
    """A key or value for a message: printable, and cut."""
    text = redact(value if isinstance(value, str) else repr(value))
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"


def _problem(value: object) -> tuple[str, str] | None:
    """What is wrong with one value, and what to do; None where nothing is."""
    match value:
        case dict():
            for name in value:
                if not isinstance(name, str):
                    return f"has the key {shown(name)}, which is no text", f"write '{shown(name)}', in quotes"
                if unprintable(name):
                    key = shortened(ascii(name), _SHOWN)
                    return f"has the key {key}, which cannot be printed", "write its name in letters"
        case str() if unprintable(value):
            return "holds a character that is no text (a control character, or half of a pair)", "write it without"
        case str() if len(value) > LONGEST:
            return f"is a text of {len(value):,} characters", f"write at most {LONGEST:,}"
        case float() if not math.isfinite(value):
            return f"is {value}, and should be a finite number", "write a number"
        case int() if abs(value) > MOST:
            return f"is a number beyond {MOST:,}", "write a smaller one"
    return None


def unprintable(text: str) -> bool:
    """Whether there is a control character but for line breaks and tabs, or half of a surrogate pair."""
    return any((c < " " and c not in "\n\r\t") or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in text)
