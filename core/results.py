"""The list of a finished stage's files in its `done.json`: size and XXH3 of each, compared before they are read.

The list finds damage, mix-ups and edits at the speed of a disk. It is no protection from somebody who edits it, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import xxhash
from pydantic import AfterValidator

from .errors import UserError
from .files import read_json, unwritable, write_whole

DONE = "done.json"
# Files of these formats at the top of a folder are picked up by their name alone: one that nobody listed may change
# what is loaded.
LOADED = {".json", ".safetensors", ".bin", ".pt", ".pth", ".model", ".py", ".jinja"}
_MOST = 2**30  # bytes of a list: some ten million files
_THREADS = 4  # that hash files of one folder
_FLUSHED = 2**20  # bytes; smaller files that a power cut took are named by their checksum, and quick to make again


def _inside(name: str) -> str:
    """A name in a list, which must not lead out of the folder."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise ValueError(f"{name} is not inside the folder")
    return name


def _whole(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a fingerprint, by whose inputs and data a folder is told from another."""
    if settings and not (isinstance(settings.get("inputs"), dict) and isinstance(settings.get("data"), list)):
        raise ValueError("settings without inputs or data")
    return settings


@dataclass(frozen=True)
class FileSum:
    """Of one file."""

    bytes: int
    xxh3: str  # 64 bits in hex


@dataclass(frozen=True)
class Mark:
    """What a stage's `fingerprint.json` says when it has begun, and its `done.json` when it has finished.

    Args:
        version: of what fingerprints cover; the first had no number.
        settings: what the fingerprint covers, of `fingerprint.json`.
        files: name -> size and checksum, of `done.json`; None: it was written before there were lists.
    """

    fingerprint: str
    version: int = 1
    settings: Annotated[dict[str, Any], AfterValidator(_whole)] | None = None
    seconds: float | None = None
    files: dict[Annotated[str, AfterValidator(_inside)], FileSum] | None = None


@dataclass(frozen=True)
class Fault:
    """A file that is not as its stage wrote it."""

    name: str
    problem: str


def read_mark(path: Path) -> Mark | None:
    """None: the file is missing, or cannot be read, as after a power cut."""
    if not path.is_file():
        return None
    try:
        return read_json(path, Mark, hint="", max_bytes=_MOST)
    except UserError:
        return None


def write_mark(path: Path, mark: Mark) -> None:
    """Whole, and on the disk when this returns."""
    write_whole(path, json.dumps({k: v for k, v in asdict(mark).items() if v is not None}).encode())


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """Name -> size and checksum. Large files are on the disk when this returns."""
    names = sorted(names)
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: _sum(folder / name), names), strict=True))


def faults(folder: Path, listed: Mapping[str, FileSum]) -> list[Fault]:
    """The files that are missing or differ, in the order of the list.

    A file is read once by this process, as long as its size, times and inode stay.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        problems = threads.map(lambda item: _problem(folder / item[0], item[1]), listed.items())
        return [Fault(name, problem) for name, problem in zip(listed, problems, strict=True) if problem is not None]


def _problem(path: Path, written: FileSum) -> str | None:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != written.bytes:
        return f"has {size:,} bytes and was written with {written.bytes:,}"
    if xxh3_of(path) != written.xxh3:
        return "was changed after it was written: its checksum differs"
    return None


def xxh3_of(path: Path) -> str:
    """XXH3 of a file, 64 bits in hex. Remembered by path, size, times and inode."""
    about = path.stat()
    return _read(path, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino)


@lru_cache(maxsize=2**20)
def _read(path: Path, *stamp: int) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
    except OSError as error:
        hint = "mend its permissions or the disk, and run the same command again"
        raise UserError(f"cannot be read: {error.strerror or error}", where=str(path), hint=hint) from error


def _sum(path: Path) -> FileSum:
    size = path.stat().st_size
    if size >= _FLUSHED:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        except OSError as error:
            raise unwritable(path, error) from error
        finally:
            os.close(file)
    return FileSum(size, xxh3_of(path))
