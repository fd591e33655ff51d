"""Checksums of a published folder, in the format of `sha256sum`. A file that was changed on the way is refused by name.

The model card has no checksum, since it may be edited on the Hub. `sha256sum -c SHA256SUMS` checks the same list.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from .errors import UserError
from .files import read_text
from .results import LOADED
from .secrets import shortened

SUMS, CARD = "SHA256SUMS", "README.md"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
# What a Hub and its client put beside the files.
_FOREIGN = {".git", ".cache", ".gitattributes"}
_CURE = "fetch it again, or publish it anew: what is checked here is what was published"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """List every file of the folder but the card."""
    sums = {name: sha256_of(folder / name) for name in _files(folder)}
    (folder / SUMS).write_text("".join(f"{value}  {name}\n" for name, value in sorted(sums.items())))


def read_sums(folder: Path) -> dict[str, str]:
    """Name -> SHA-256. Raises `UserError` for a malformed line, or a name that leads out of the folder."""
    sums: dict[str, str] = {}
    for line in read_text(folder / SUMS, hint=_CURE).splitlines():
        parts = _LINE.fullmatch(line)
        if parts is None or parts[2].startswith("/") or ".." in parts[2].split("/"):
            raise UserError(f"no line of checksums: {shortened(line, 100)!r}", where=str(folder / SUMS), hint=_CURE)
        sums[parts[2]] = parts[1]
    if not sums:
        raise UserError("lists no file", where=str(folder / SUMS), hint=_CURE)
    return sums


def check_sums(folder: Path, only: Sequence[str] | None = None) -> None:
    """Compare a folder with its list of checksums: the files that match `only`, or (None) all of them, and no others
    that a loader would pick up. A folder without a list passes. Raises `UserError` where a file is missing, has been
    changed or added; `where` names it.
    """
    if not (folder / SUMS).is_file():
        return
    listed = read_sums(folder)
    for name, expected in listed.items():
        if only is not None and not any(fnmatch(name, pattern) for pattern in only):
            continue
        path = folder / name
        if not path.is_file():
            raise UserError(f"{name} is missing", where=str(path), hint=_CURE)
        if sha256_of(path) != expected:
            raise UserError(f"{name} is not as it was published: its checksum differs", where=str(path), hint=_CURE)
    if only is None:
        for name in _files(folder):
            if name not in listed and "/" not in name and Path(name).suffix in LOADED:
                raise UserError(f"{name} is not one of the published files", where=str(folder / name), hint=_CURE)


def _files(folder: Path) -> list[str]:
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(name) for name in names if name.parts[0] not in _FOREIGN and str(name) not in (SUMS, CARD))
