"""Names of files in recipes: braces ({a,b}.json) and glob patterns (part-*.json)."""

from __future__ import annotations

import math
import re
from glob import glob, has_magic
from pathlib import Path

from braceexpand import braceexpand

from ...core.errors import NotFound, UserError

MOST_NAMES = 200_000  # the largest published sets have 140,000 shards
_GROUP, _NUMBER = re.compile(r"\{([^{}]*)\}"), re.compile("\0(\\d+)\0")
_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?")


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
    if (count := _count(name)) > MOST_NAMES:
        raise ValueError(f"they are {count:,} names, and at most {MOST_NAMES:,} are read")
    return list(braceexpand(name))


def _count(name: str) -> int:
    """How many names the braces give, without making them. Inner groups first, each then stands as its number."""
    groups = [1]
    while (group := _GROUP.search(name)) is not None:
        if (ends := _RANGE.fullmatch(group[1])) is not None:
            first, last = (int(end) if end.lstrip("-").isdigit() else ord(end) for end in ends.group(1, 2))
            count = abs(last - first) // max(1, abs(int(ends[3] or 1))) + 1
        else:
            parts = group[1].split(",")
            count = sum(math.prod(groups[int(number)] for number in _NUMBER.findall(part)) for part in parts)
        groups.append(count)
        name = f"{name[: group.start()]}\0{len(groups) - 1}\0{name[group.end() :]}"
    return math.prod(groups[int(number)] for number in _NUMBER.findall(name))


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
