"""Names of files in recipes: braces ({a,b}.json) and glob patterns (part-*.json)."""

from __future__ import annotations

import re
from glob import glob, has_magic
from itertools import islice
from pathlib import Path

from braceexpand import braceexpand

from ...core.errors import NotFound, UserError

MOST_NAMES = 200_000  # the largest published sets have 140,000 shards
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


def braces(name: str, *, key: str | None = None, where: str | None = None) -> list[Path]:
    """A name as it is where such a file exists, else with its braces expanded and its glob patterns matched, sorted.

    A pattern that matches nothing stands for itself: `matched` tells of it.
    """
    if Path(name).exists():
        return [Path(name)]
    try:
        names = expanded(name) if "{" in name else [name]
    except ValueError as error:
        raise UserError(f"braces that do not expand: {name!r} ({error})", key=key, where=where,
                        hint="write them as {a,b}.json") from error  # fmt: skip
    return [Path(match) for one in names for match in (sorted(glob(one)) if is_pattern(one) else []) or [one]]


def expanded(name: str) -> list[str]:
    """A name with its braces expanded, a bounded number of them.

    Raises:
        ValueError: braces that do not close, or more than `MOST_NAMES` names.
    """
    sizes = [abs(int(last) - int(first)) for first, last in _RANGE.findall(name)]  # each of which is made whole
    names = list(islice(braceexpand(name), MOST_NAMES + 1)) if max(sizes, default=0) < MOST_NAMES else []
    if not 0 < len(names) <= MOST_NAMES:
        raise ValueError(f"they are more than the {MOST_NAMES:,} names that are read at most")
    return names


def unmatched(name: str) -> list[str]:
    """Return the patterns of `braces(name, ...)` that match nothing."""
    return [str(path) for path in braces(name) if is_pattern(str(path)) and not glob(str(path))]


def is_pattern(name: str) -> bool:
    return has_magic(name) and not Path(name).exists()


def matched(name: str, key: str) -> str:
    """`name`, a file or a pattern. Raises `UserError` with pattern and folder where it is one that matches nothing."""
    if is_pattern(name) and not glob(name):
        folder = Path(name).parent
        missing = "" if folder.is_dir() or has_magic(str(folder)) else ", which is no folder"
        raise NotFound(f"no file matches the pattern {Path(name).name!r} in {folder}{missing}", key=key,
                        hint="correct the pattern or the folder")  # fmt: skip
    return name
