"""Records read by offset: memory stays flat however many there are. Here those of LLaVA JSON and JSONL.

One pass over a file notes where each record lies, how long it is and what is wrong with it; the
result is kept in a cache folder, so that the next start reads numpy arrays only.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import NotFound, UserError
from ...core.files import open_data, parse_json, write_whole
from ...core.json_types import Json, JsonObject, value_at
from ...core.locks import locked
from ...core.ranks import notice
from . import scan
from .record import check_record, num_learned, paths

_FORMAT = 9  # of a kept index and of the checks it holds: count up when either changes


# What an index holds of each record, and the type of the array.
COLUMNS: dict[str, type[np.generic]] = {
    "offsets": np.int64,  # first byte
    "sizes": np.int32,  # bytes
    "lengths": np.int32,  # words over all turns, negative for text-only records
    "images": np.int16,  # pictures that a record names
    "clips": np.int16,
    "answers": np.int32,  # to learn; 0: a question alone
}


class Reader:
    """Reads records where they lie: in a JSON file, a table, tars. `name` is in the names of samples (a file keeps it
    when its folder moves), `label` is for messages; relative paths of pictures start at `folder`.
    """

    def __init__(self, name: str, label: str, folder: Path):
        self.name, self.label, self.folder = name, label, folder

    def __str__(self) -> str:
        return self.label

    def file_of(self, offset: int) -> str:
        """The file that holds the record at `offset`, for messages."""
        return self.label

    def read(self, offset: int, size: int) -> Json:
        """The record there. Files are opened anew: a handle shared by workers would share its position."""
        raise NotImplementedError


class JsonReader(Reader):
    """Records of a JSON or JSONL file by their bytes."""

    def __init__(self, path: Path):
        super().__init__(path.name, str(path), path.parent)
        self.path = path

    def read(self, offset: int, size: int) -> Json:
        with open_data(self.path) as file:
            file.seek(offset)
            return scan.read_record(file.read(size))


@dataclass(frozen=True)
class _Extra:
    """What an index holds besides arrays."""

    problems: dict[int, str]  # record -> what is wrong with it
    duplicate_ids: int  # usable records whose id an earlier one has
    first_duplicate: tuple[int, int] | None  # the first of them, and that earlier record


@dataclass(frozen=True)
class RecordFile(_Extra):
    """One indexed file, or a set of files that count as one."""

    reader: Reader
    columns: dict[str, np.ndarray]  # name, as in `COLUMNS` -> [n], in file order

    def __len__(self) -> int:
        return len(self.columns["offsets"])

    def __str__(self) -> str:
        return str(self.reader)

    def read(self, index: int) -> JsonObject:
        """Record `index`; of one that is listed in `problems` maybe no dict."""
        return self.reader.read(int(self.columns["offsets"][index]), int(self.columns["sizes"][index]))

    def file_of(self, index: int) -> str:
        """The file that holds record `index`."""
        return self.reader.file_of(int(self.columns["offsets"][index]))

    def digest(self) -> str:
        """Hash of the records' sizes and lengths, where there is no file to hash."""
        return hashlib.sha256(b"".join(self.columns[name].tobytes() for name in ("sizes", "lengths"))).hexdigest()


def open_records(path: Path, cache: Path) -> RecordFile:
    """Index `path`, or take the index from `cache`. Raises `UserError`: it is missing, empty or not JSON."""
    if not path.is_file():
        raise NotFound("data file not found", where=str(path), hint="check `path` of the data section")

    def index() -> RecordFile:
        scan.check_kind(path)
        hint = "give a JSON list, or JSONL with one record in each line"
        return indexed(JsonReader(path), scan.entries(path), hint)

    return open_index(JsonReader(path), f"{path.stem}-{file_identity(path)[:16]}", cache, index)


def open_index(reader: Reader, name: str, cache: Path, index: Callable[[], RecordFile]) -> RecordFile:
    """The index that `cache` keeps under `name`, or else the one that `index` makes."""
    index_file = cache / f"{name}-{_FORMAT}.npz"
    cache.mkdir(parents=True, exist_ok=True)
    # The first of several ranks makes the index; the others wait and take it.
    with locked(index_file.with_suffix(".lock")):
        arrays = read_arrays(index_file, {**COLUMNS, "extra": np.str_})
        if arrays is None:
            records = index()
            extra = {field.name: getattr(records, field.name) for field in fields(_Extra)}
            write_arrays(index_file, records.columns | {"extra": np.array(json.dumps(extra))})
            return records
    held = parse_json(str(arrays.pop("extra")).encode(), _Extra, where=str(index_file), hint="delete the file")
    return RecordFile(**vars(held), reader=reader, columns=arrays)


_COUNTS_TIMES = ContextVar("whether identities count times of writing", default=True)


@contextmanager
def of_any_copy() -> Iterator[None]:
    """Inside, an identity does not count when its file was written, which each node's copy has of its own."""
    token = _COUNTS_TIMES.set(False)
    try:
        yield
    finally:
        _COUNTS_TIMES.reset(token)


def file_identity(path: Path) -> str:
    """Hash of a file's name, size and content; above 64 MiB of its first and last MiB and its time of writing."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{path.name}/{size}/".encode())
    with open_data(path) as file:
        if size <= 64 << 20:
            while piece := file.read(1 << 20):
                digest.update(piece)
        else:
            digest.update(file.read(1 << 20))
            file.seek(-(1 << 20), os.SEEK_END)
            digest.update(file.read())
            if _COUNTS_TIMES.get():
                digest.update(str(path.stat().st_mtime_ns).encode())
    return digest.hexdigest()


def indexed(reader: Reader, entries: Iterable[scan.Entry], hint: str) -> RecordFile:
    """The index of records that come one by one. Raises `UserError` with `hint` where there is none."""
    rows = array("q")  # of record after record: an offset, a size, ... and the hash of its id
    problems: dict[int, str] = {}
    for number, (offset, size, record) in enumerate(entries):
        if problem := check_record(record):
            problems[number] = problem
            rows.extend((offset, size, 0, 0, 0, 0, 0))
            continue
        images, clips = len(paths(record, "image")), len(paths(record, "video"))
        words = sum(len(turn["value"].split()) for turn in record["conversations"])
        name = record.get("id")
        lengths = words if images or clips else -words
        id_hash = 0 if name is None else hash(str(name))
        rows.extend((offset, size, lengths, images, clips, num_learned(record), id_hash))
    if not rows:
        raise UserError("no records", where=str(reader), hint=hint)
    table = np.frombuffer(rows, dtype=np.int64).reshape(-1, len(COLUMNS) + 1)
    columns = {name: table[:, place].astype(kind) for place, (name, kind) in enumerate(COLUMNS.items())}
    repeated = duplicates(table[:, -1]).tolist()
    first = tuple(repeated[0]) if repeated else None
    return RecordFile(problems, len(repeated), first, reader, columns)


def duplicates(hashes: np.ndarray) -> np.ndarray:
    """[d,2] the records whose id an earlier record has, in file order, and the first record that has it."""
    named = np.flatnonzero(hashes)
    _, first, inverse = np.unique(hashes[named], return_index=True, return_inverse=True)
    pairs = np.stack([named, named[first[inverse]]], axis=1)
    return pairs[pairs[:, 0] != pairs[:, 1]]


def id_of(file: RecordFile, index: int) -> object:
    """What a record calls itself; None where it is no object or has no id."""
    return value_at(file.read(index), "id")


def name_of(file: RecordFile, index: int) -> str:
    """Place and id of a record, for messages."""
    return f"record {index} (id {id_of(file, index)!r})"


def repeated_ids(file: RecordFile) -> tuple[str, str] | None:
    """(problem, place) where ids do not tell the records of a file apart."""
    if file.first_duplicate is None:
        return None
    index, earlier = file.first_duplicate
    problem = f"{file.duplicate_ids} records repeat the id of an earlier one"
    return problem, f"{name_of(file, index)} repeats record {earlier}"


# What reading a zip that is cut, edited or none raises, and an array that would be unpickled.
_DAMAGED = (zipfile.BadZipFile, ValueError, EOFError, KeyError, TypeError, RuntimeError, OSError)


def read_arrays(path: Path, kinds: Mapping[str, type[np.generic]]) -> dict[str, np.ndarray] | None:
    """The arrays that `write_arrays` kept, by name and dtype; None: none are there, or damaged ones, which is said."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in kinds}
        for name, kind in kinds.items():
            if not np.issubdtype(arrays[name].dtype, kind):
                raise ValueError(f"{name} is of {arrays[name].dtype}")
    except _DAMAGED as error:
        notice(f"{path} is damaged and is made again ({error or type(error).__name__})")
        return None
    return arrays


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Keep the arrays under their names. Raises `UserError` where the disk is full."""
    items: dict[str, Any] = dict(arrays)
    np.savez(content := io.BytesIO(), **items)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content.getvalue())
