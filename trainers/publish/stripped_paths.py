"""Texts that go out name files without their places: how a machine's folders are called, and whose they are, stays."""

from __future__ import annotations

import re
from pathlib import Path

from ...core.json_types import Json, with_each

_PART = r"[^\s/\\'\"`,;:=(){}\[\]<>|&]+"
_HOME = re.compile(rf"/(?:home|Users)/{_PART}")
# From the root (two parts at least: `/s` is none), from a home, or upwards; addresses and relative paths are not meant.
_PLACE = re.compile(rf"(?<![\w.~/*)\]}}>-])(?:(?:/{_PART}){{2,}}|~(?:/{_PART})+|(?:\.\./)+(?:{_PART}/)*{_PART})/?")


def without_places(value: object) -> Json:
    """A text, or a nested structure of them, with the last names of the paths in it."""
    return with_each(value, str, _text)


def _text(text: str) -> str:
    if text.startswith(("/", "~/", "../")) and "\n" not in text and "://" not in text:
        return _last(text)  # a path and nothing else, whatever blanks are in it
    # The longer one first: either may lie in the other.
    for known, shown in sorted(((Path.cwd(), "."), (Path.home(), "~")), key=lambda pair: -len(pair[0].parts)):
        if len(known.parts) > 1:
            text = re.sub(re.escape(str(known)) + r"(?![\w.-])", shown, text)
    return _PLACE.sub(lambda match: _last(match[0]), _HOME.sub("~", text))


def _last(path: str) -> str:
    """The last part; of a home itself not even that."""
    known = _HOME.sub("~", path.replace(str(Path.home()), "~") if len(Path.home().parts) > 1 else path)
    return Path(known).name
