"""Records read by offset: memory stays flat however many there are. Here those of LLaVA JSON and JSONL.

One pass over a file notes where each record lies, how long it is and what is wrong with it; the
result is kept in a cache folder, so that the next start reads numpy arrays only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from ...core.errors import NotFound, UserError
from ...core.files import open_data, parse_json
from ...core.json_types import Json, JsonObject, value_at
from ...core.locks import locked
from . import scan
from .kept_arrays import read_arrays, write_arrays
from .record import check_record, num_learned, paths
from .workers import num_processes, quiet_worker

_FORMAT = 7  # of a kept index and of the checks it holds: count up when either changes


# What an index holds of each record, and the type of the array.
COLUMNS: dict[str, type[np.generic]] = {
    "offsets": np.int64,  # first byte
    "sizes": np.int32,  # bytes
    "lengths": np.int32,  # words over all turns, negative for text-only records
    "images": np.int16,  # pictures that a record names
    "clips": np.int16,
    "answers": np.int32,  # to learn; 0: a question alone
}
_TYPES = COLUMNS | {"id_hashes": np.int64}


class Reader:
    """Reads records where they lie: in a JSON file, a table, tars.

    Args:
        name: in the names of samples; a file keeps it when its folder moves.
        label: for messages.
        folder: that relative paths of pictures start at, unless the data section names one.
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
            return json.loads(file.read(size))


@dataclass(frozen=True)
class RecordFile:
    """One indexed file, or a set of files that count as one."""

    reader: Reader
    columns: dict[str, np.ndarray]  # name, as in `COLUMNS` -> [n], in file order
    problems: dict[int, str]  # record -> what is wrong with it
    id_kinds: dict[str, int]  # type of a usable record's `id` -> the first record that has such a one
    duplicate_ids: int  # usable records whose id an earlier one has
    first_duplicate: tuple[int, int] | None  # the first of them, and that earlier record

    def __len__(self) -> int:
        return len(self.columns["offsets"])

    def __str__(self) -> str:
        return str(self.reader)

    @property
    def name(self) -> str:
        """In the names of samples."""
        return self.reader.name

    @property
    def folder(self) -> Path:
        """That relative paths of pictures start at, unless the data section names one."""
        return self.reader.folder

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
    """Index `path`, or take the index from `cache` where the file is unchanged.

    Raises:
        UserError: the file is missing, empty or not JSON; the message names the place.
    """
    if not path.is_file():
        raise NotFound("data file not found", where=str(path), hint="check `path` of the data section")
    return open_index(JsonReader(path), f"{path.stem}-{file_identity(path)[:16]}", cache, lambda: _index(path))


def open_index(reader: Reader, name: str, cache: Path, index: Callable[[], RecordFile]) -> RecordFile:
    """The index that `cache` keeps under `name`, or else the one that `index` makes."""
    kept = cache / f"{name}-{_FORMAT}.npz"
    cache.mkdir(parents=True, exist_ok=True)
    # The first of several ranks makes the index with all cores; the others wait and take it.
    with locked(kept.with_suffix(".lock")):
        arrays = read_arrays(kept, {**COLUMNS, "extra": np.str_})
        if arrays is None:
            records = index()
            own = {field.name: vars(records)[field.name] for field in fields(_Extra)}
            write_arrays(kept, records.columns | {"extra": np.array(json.dumps(own))})
            return records
    extra = parse_json(str(arrays.pop("extra")).encode(), _Extra, where=str(kept), hint="delete the file")
    return RecordFile(reader, arrays, **vars(extra))


@dataclass(frozen=True)
class _Extra:
    """What an index holds besides arrays, as of `RecordFile`."""

    problems: dict[int, str]
    id_kinds: dict[str, int]
    duplicate_ids: int
    first_duplicate: tuple[int, int] | None


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
    """Hash of a file's name, size and content; of its first and last MiB and its time of writing where it is larger
    than 64 MiB.
    """
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


@dataclass(frozen=True)
class Part:
    """The records of a piece of a file, numbered from its beginning."""

    columns: dict[str, np.ndarray]  # of `COLUMNS`, and id_hashes [n] int64: 0 without an id, and of unusable records
    problems: dict[int, str]
    id_kinds: dict[str, int]


def _index(path: Path) -> RecordFile:
    scan.check_kind(path)
    parts = _scan_pieces(path) or [scan_part(scan.entries(path))]
    return joined(JsonReader(path), parts, "give a JSON list, or JSONL with one record in each line")


def joined(reader: Reader, parts: list[Part], hint: str) -> RecordFile:
    """The index of parts that follow each other. Raises `UserError` with `hint` where there is no record."""
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    if not len(columns["offsets"]):
        raise UserError("no records", where=str(reader), hint=hint)
    problems: dict[int, str] = {}
    kinds: dict[str, int] = {}
    start = 0
    for part in parts:
        problems |= {start + record: problem for record, problem in part.problems.items()}
        kinds = {kind: start + record for kind, record in part.id_kinds.items()} | kinds
        start += len(part.columns["offsets"])
    repeated = duplicates(columns.pop("id_hashes")).tolist()
    first = tuple(repeated[0]) if repeated else None
    return RecordFile(reader, columns, problems, dict(sorted(kinds.items())), len(repeated), first)


def _scan_pieces(path: Path) -> list[Part] | None:
    """The parts of a file, of a large one by several processes; None where a cut was wrong, or the file is broken."""
    cuts = scan.cuts(path)
    scan_piece = functools.partial(_scan_piece, path)
    if num_processes() > 1 and path.stat().st_size >= 4 * scan.CHUNK:
        return by_processes(scan_piece, cuts[:-1], cuts[1:])
    return _all_of(list(map(scan_piece, cuts[:-1], cuts[1:])))


def by_processes(scan_piece: Callable[..., Part | None], *arguments: Iterable[object]) -> list[Part] | None:
    """The parts of all pieces in their order; None where one of them is None."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_processes(), mp_context=fork, initializer=quiet_worker, initargs=(0,)) as pool:
        return _all_of(list(pool.map(scan_piece, *arguments)))


def _all_of(parts: list[Part | None]) -> list[Part] | None:
    whole = [part for part in parts if part is not None]
    return whole if len(whole) == len(parts) else None


def _scan_piece(path: Path, start: int, stop: int) -> Part | None:
    try:
        return scan_part(scan.piece(path, start, stop))
    except (UserError, ValueError):
        return None


def scan_part(entries: Iterable[scan.Entry]) -> Part:
    """What an index holds of records that come one by one."""
    rows: list[int] = []  # of record after record
    problems: dict[int, str] = {}
    kinds: dict[str, int] = {}
    for number, (offset, size, record) in enumerate(entries):
        if problem := check_record(record):
            problems[number] = problem
            rows += (offset, size, 0, 0, 0, 0, 0)
            continue
        images, clips = len(paths(record, "image")), len(paths(record, "video"))
        words = sum(len(turn["value"].split()) for turn in record["conversations"])
        name = record.get("id")
        kinds.setdefault(type(name).__name__, number)
        # Python's own hash differs from process to process, but not between forked ones.
        id_hash = 0 if name is None else hash(str(name))
        rows += (offset, size, words if images or clips else -words, images, clips, num_learned(record), id_hash)
    table = np.array(rows, dtype=np.int64).reshape(-1, len(_TYPES))
    columns = {name: table[:, place].astype(kind) for place, (name, kind) in enumerate(_TYPES.items())}
    return Part(columns, problems, kinds)


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


def id_problems(file: RecordFile) -> Iterator[tuple[str, str]]:
    """(problem, place) where ids do not tell the records of a file apart."""
    if len(file.id_kinds) > 1:
        first = " and ".join(name_of(file, index) for index in sorted(file.id_kinds.values()))
        yield f"ids of different types: {', '.join(file.id_kinds)}", first
    if file.first_duplicate:
        index, earlier = file.first_duplicate
        yield (
            f"{file.duplicate_ids} records repeat the id of an earlier one",
            f"{name_of(file, index)} repeats record {earlier}",
        )
