"""Lists of files that are compared before the files are read: of a finished stage in its `done.json`, of a published
folder in SHA256SUMS.

A stage's list has size and XXH3 of each file, which finds damage, mix-ups and edits at the speed of a disk. A published
folder's is in the format of `sha256sum`, which checks the same list (`-c SHA256SUMS`); the model card has no checksum,
since it may be edited on the Hub. Neither protects from somebody who edits the list, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

import xxhash
from pydantic import AfterValidator

from .errors import UserError
from .files import flush, read_json, read_text, unwritable, write_whole
from .json_types import JsonObject, list_at, object_at
from .secrets import shortened

DATASET_FOLDER = "world"  # the synthetic dataset
TOKENIZER = "tokenizer"  # of its captions
CODES = "shards"  # encoded pictures
STATES = "states"  # the target's hidden states


DONE = "done.json"
BEGUN = "fingerprint.json"
# Files of these formats at the top of a folder are picked up by their name alone: one that nobody listed may change
# what is loaded.
LOADED = {".json", ".safetensors", ".bin", ".pt", ".pth", ".model", ".py", ".jinja"}
_MOST = 2**30  # bytes of a list: some ten million files
# Bytes. Smaller files are not worth a thread, nor a flush: one that a power cut took is told by its checksum.
_LARGE = 2**20

SUMS, CARD = "SHA256SUMS", "README.md"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
# What a Hub and its client put beside the files.
_FOREIGN = {".git", ".cache", ".gitattributes"}
_CURE = "fetch it again, or publish it anew: what is checked here is what was published"

Stamp = tuple[int, int, int, int]


def _inside(name: str) -> str:
    """A name in a list, which must not lead out of the folder."""
    if not name or name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name} is not inside the folder")
    return name


def _whole(settings: JsonObject) -> JsonObject:
    """Settings of a fingerprint, by whose inputs and data a folder is told from another."""
    if settings and (object_at(settings, "inputs") is None or list_at(settings, "data") is None):
        raise ValueError("settings without inputs or data")
    return settings


@dataclass(frozen=True)
class FileSum:
    """Size and checksum of one file."""

    bytes: int
    xxh3: str  # 64 bits in hex


@dataclass(frozen=True)
class Mark:
    """What a stage's `fingerprint.json` says when it has begun, and its `done.json` when it has finished."""

    fingerprint: str
    version: int = 1  # of what fingerprints cover; the first had no number
    settings: Annotated[JsonObject, AfterValidator(_whole)] | None = None  # what it covers, of `fingerprint.json`
    resolved: dict[str, str] | None = None  # setting that is `auto` -> what it became where the stage began; in both
    seconds: float | None = None  # of the stage's last start, of `done.json`, as are the next three
    ranks: int | None = None  # that ran the stage
    gpus: int | None = None  # that they held together; 0: on CPUs
    # Name -> size and checksum; None: it was written before there were lists.
    files: dict[Annotated[str, AfterValidator(_inside)], FileSum] | None = None


class Fault(NamedTuple):
    """A file that is not as its stage wrote it."""

    name: str
    problem: str


def read_mark(path: Path) -> Mark | None:
    """None: there is none. Raises `UserError` for one that is damaged, as by a disk."""
    stamp = _stamp(str(path))
    return None if stamp is None else _parsed(path, stamp)


@lru_cache(maxsize=256)
def _parsed(path: Path, stamp: Stamp) -> Mark:
    # A list of ten thousands of files is asked for often.
    hint = (
        f"put it back as it was, or delete it: of {DONE} and {BEGUN} the same command writes one again by the other, "
        "and without both it keeps the stage's folder aside and begins anew"
    )
    return read_json(path, Mark, hint=hint, max_bytes=_MOST)


def write_mark(path: Path, mark: Mark) -> None:
    """Whole, and on the disk when this returns."""
    write_whole(path, json.dumps({k: v for k, v in asdict(mark).items() if v is not None}).encode())


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """Name -> size and checksum. Large files are on the disk when this returns."""
    _read_large(folder, names := sorted(names))
    return {name: _sum(os.path.join(folder, name)) for name in names}


def faults(folder: Path, listed: Mapping[str, FileSum]) -> list[Fault]:
    """The files that are missing or differ, in the order of the list.

    A file is read once by this process, as long as its size, times and inode stay.
    """
    _read_large(folder, listed)
    problems = {name: _problem(os.path.join(folder, name), entry) for name, entry in listed.items()}
    return [Fault(name, problem) for name, problem in problems.items() if problem is not None]


def _loadable(folder: Path) -> list[str]:
    """Hidden files (`._config.json` of a copy from a Mac, `.nfs0001`) are none that a loader picks up."""
    return sorted(p.name for p in folder.iterdir() if p.suffix in LOADED and not p.name.startswith("."))


def damage(folder: Path, listed: Mapping[str, FileSum], is_read: Callable[[str], bool]) -> list[Fault]:
    """The files of a list that are read and missing or changed, and those at the top of the folder that a loader would
    pick up and that nobody listed.
    """
    added = [name for name in _loadable(folder) if name not in listed and name not in (DONE, BEGUN) and is_read(name)]
    damaged = faults(folder, {name: entry for name, entry in listed.items() if is_read(name)})
    return damaged + [Fault(name, "is not one of its files") for name in added]


def check_written(folder: Path, only: Sequence[str] = ("*",)) -> None:
    """Compare a finished stage's folder, or one inside it, with the stage's list, for who reads it outside a run: of
    the files at its top those that match `only`. A folder that no stage wrote passes.

    Raises:
        UserError: the stage has not finished; or a file is missing, was changed or was added. `where` names it.
    """
    if not (folder / DONE).exists() and (folder / BEGUN).exists():
        raise UserError(f"stage {folder.name} has not finished", where=str(folder),
                        hint="run the recipe's command again, which ends it")  # fmt: skip
    for stage, inside in ((folder, ""), (folder.parent, f"{folder.name}/")):
        # What only has its name in a folder above may be a script's.
        mark = None if inside and not (stage / BEGUN).exists() else read_mark(stage / DONE)
        listed = {} if mark is None or mark.files is None else mark.files
        here = {name.removeprefix(inside): entry for name, entry in listed.items() if name.startswith(inside)}
        if not here:
            continue
        for name, problem in damage(folder, here, lambda name: "/" not in name and any(fnmatch(name, p) for p in only)):
            raise UserError(
                f"{inside}{name} of stage {stage.name} {problem}", where=str(folder / name),
                hint=f"put the file back as it was, or run the stage again: restart={stage.name}",
            )  # fmt: skip
        return


def _stamp(path: str) -> Stamp | None:
    """What tells that a file is still the one that was read; None: there is no such file."""
    try:
        about = os.stat(path)
    except OSError:
        return None
    is_file = stat.S_ISREG(about.st_mode)
    return (about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino) if is_file else None


def _read_large(folder: Path, names: Iterable[str]) -> None:
    """Several at once: one thread reads slower than a fast disk."""
    paths = [os.path.join(folder, name) for name in names]
    large = [(path, stamp) for path in paths if (stamp := _stamp(path)) is not None and stamp[0] >= _LARGE]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda file: _xxh3(*file), large))


def _problem(path: str, written: FileSum) -> str | None:
    stamp = _stamp(path)
    if stamp is None:
        return "is missing"
    if stamp[0] != written.bytes:
        return f"has {stamp[0]:,} bytes and was written with {written.bytes:,}"
    return None if _xxh3(path, stamp) == written.xxh3 else "was changed after it was written: its checksum differs"


@lru_cache(maxsize=2**20)
def _xxh3(path: str, stamp: Stamp) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
    except OSError as error:
        hint = "fix its permissions or the disk, and run the same command again"
        raise UserError(f"cannot be read: {error.strerror or error}", where=path, hint=hint) from error


def _sum(path: str) -> FileSum:
    stamp = _stamp(path)
    assert stamp is not None, path
    if stamp[0] >= _LARGE:
        try:
            flush(path)
        except OSError as error:
            raise unwritable(Path(path), error) from error
    return FileSum(stamp[0], _xxh3(path, stamp))


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
        for name in _loadable(folder):
            if name not in listed:
                raise UserError(f"{name} is not one of the published files", where=str(folder / name), hint=_CURE)


def _files(folder: Path) -> list[str]:
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(name) for name in names if name.parts[0] not in _FOREIGN and str(name) not in (SUMS, CARD))
