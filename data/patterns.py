"""Names of files in recipes: braces ({a,b}.json) and glob patterns (part-*.json)."""

from __future__ import annotations

from glob import glob, has_magic
from pathlib import Path

from braceexpand import braceexpand

from ..core.errors import UserError


def braces(name: str, where: str) -> list[Path]:
    """A name as it is where such a file exists, else with its braces expanded and its glob patterns matched, sorted.

    A pattern that matches nothing stands for itself: `matched` tells of it.
    """
    if Path(name).exists():
        return [Path(name)]
    try:
        names = list(braceexpand(name)) if "{" in name else [name]
    except ValueError as error:
        raise UserError(f"braces that do not expand: {name!r}", where=where, hint="write them as {a,b}.json") from error
    return [Path(match) for one in names for match in (sorted(glob(one)) if is_pattern(one) else []) or [one]]


def unmatched(name: str) -> list[str]:
    """Of `braces(name, ...)` the patterns that match nothing."""
    return [str(path) for path in braces(name, "key path") if is_pattern(str(path)) and not glob(str(path))]


def is_pattern(name: str) -> bool:
    return has_magic(name) and not Path(name).exists()


def matched(name: str, key: str) -> str:
    """`name`, a file or a pattern. Raises `UserError` with pattern and folder where it is one that matches nothing."""
    if is_pattern(name) and not glob(name):
        folder = Path(name).parent
        missing = "" if folder.is_dir() or has_magic(str(folder)) else ", which is no folder"
        raise UserError(f"no file matches the pattern {Path(name).name!r} in {folder}{missing}", where=key,
                        hint="correct the pattern or the folder")  # fmt: skip
    return name
