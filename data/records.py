"""LLaVA JSON and JSONL read by offset: memory stays flat however many records there are.

One pass over a file notes where each record lies, how long it is and what is wrong with it; the
result is kept in a cache folder, so that the next start reads numpy arrays only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import UserError
from .conversations import IMAGE_MARK, ROLES

_CHUNK = 16 << 20  # characters read at a time
_SEPARATORS = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class RecordFile:
    """One indexed file. Arrays have an entry for each record, in file order."""

    path: Path
    offsets: np.ndarray  # [n] int64 first byte
    sizes: np.ndarray  # [n] int32 bytes
    lengths: np.ndarray  # [n] int32 words over all turns, negative for text-only records
    problems: dict[int, str]  # record -> what is wrong with it
    id_kinds: tuple[str, ...]  # types of the `id` values
    duplicate_ids: int  # records whose id an earlier record has

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, index: int) -> dict[str, Any]:
        """Record `index`, opened anew each time: a handle shared by workers would share its position."""
        with open(self.path, "rb") as file:
            file.seek(int(self.offsets[index]))
            return json.loads(file.read(int(self.sizes[index])))


def open_records(path: Path, cache: Path) -> RecordFile:
    """Index `path`, or take the index from `cache` where the file is unchanged.

    Raises:
        UserError: the file is missing, empty or not JSON; the message names the place.
    """
    if not path.is_file():
        raise UserError("data file not found", where=str(path), cure="check `path` of the data section")
    kept = cache / f"{path.stem}-{file_identity(path)[:16]}.npz"
    if kept.is_file():
        with np.load(kept, allow_pickle=False) as arrays:
            extra = json.loads(str(arrays["extra"]))
            problems = {int(k): v for k, v in extra["problems"].items()}
            found = RecordFile(
                path, arrays["offsets"], arrays["sizes"], arrays["lengths"], problems,
                tuple(extra["id_kinds"]), extra["duplicate_ids"],
            )  # fmt: skip
            return found
    found = _index(path)
    _keep(found, kept)
    return found


def file_identity(path: Path) -> str:
    """Hash of a file's name, size and content (its first and last MiB where it is larger than 64 MiB)."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{path.name}/{size}/".encode())
    with open(path, "rb") as file:
        if size <= 64 << 20:
            digest.update(file.read())
        else:
            digest.update(file.read(1 << 20))
            file.seek(-(1 << 20), os.SEEK_END)
            digest.update(file.read())
            digest.update(str(path.stat().st_mtime_ns).encode())
    return digest.hexdigest()


def check_record(record: Any) -> str | None:
    """What is wrong with a record's text, or None. Pictures are looked at when they are read."""
    if not isinstance(record, dict):
        return "not an object with id and conversations"
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns:
        return "no conversations"
    roles = [turn.get("from") if isinstance(turn, dict) else None for turn in turns]
    for role in roles:
        if role not in ROLES:
            return f"unknown role {role!r} (roles are human and gpt)"
    if any(not isinstance(turn.get("value"), str) for turn in turns):
        return "a turn without text"
    if roles[0] == "gpt":
        roles, turns = roles[1:], turns[1:]
    if any(role != ("human", "gpt")[i % 2] for i, role in enumerate(roles)):
        return "the roles human and gpt do not alternate"
    if "gpt" not in roles:
        return "no answer to train on"
    if any(turn["from"] == "gpt" and not turn["value"].strip() for turn in turns):
        return "empty answer"
    images, marks = num_images(record), sum(turn["value"].count(IMAGE_MARK) for turn in turns)
    if marks != images:
        return f"{marks} <image> marks for {images} images"
    return None


def num_images(record: dict[str, Any]) -> int:
    """Pictures that a record names: `image` is absent, one path, or a list of paths."""
    image = record.get("image")
    return 0 if not image else 1 if isinstance(image, str) else len(image)


def _index(path: Path) -> RecordFile:
    offsets, sizes, lengths, problems, kinds = [], [], [], {}, set()
    id_hashes = []
    for number, (offset, size, record) in enumerate(_records(path)):
        offsets.append(offset)
        sizes.append(size)
        problem = check_record(record)
        if problem:
            problems[number] = problem
            lengths.append(0)
        else:
            words = sum(len(turn["value"].split()) for turn in record["conversations"])
            lengths.append(words if num_images(record) else -words)
        name = record.get("id") if isinstance(record, dict) else None
        kinds.add(type(name).__name__)
        id_hashes.append(hash(str(name)))
    if not offsets:
        raise UserError("no records", where=str(path), cure="give a JSON list, or JSONL with one record in each line")
    return RecordFile(
        path,
        np.array(offsets, dtype=np.int64),
        np.array(sizes, dtype=np.int32),
        np.array(lengths, dtype=np.int32),
        problems,
        tuple(sorted(kinds)),
        len(id_hashes) - len(np.unique(np.array(id_hashes, dtype=np.int64))),
    )


def _records(path: Path) -> Iterator[tuple[int, int, Any]]:
    """(first byte, bytes, value) of each record."""
    with open(path, encoding="utf-8", newline="") as file:
        first = file.read(_CHUNK)
        stripped = first.lstrip()
        if stripped.startswith("[") and path.suffix != ".jsonl":
            skipped = len(first) - len(stripped) + 1
            yield from _array(path, file, first[skipped:], len(first[:skipped].encode()))
            return
    with open(path, "rb") as lines:
        offset = 0
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield offset, len(line), json.loads(line)
                except ValueError as error:
                    raise _broken(path, f"line {number}", error) from error
            offset += len(line)


def _array(path: Path, file: Any, text: str, offset: int) -> Iterator[tuple[int, int, Any]]:
    """Decode a JSON list record by record, holding one chunk of text at a time."""
    decoder = json.JSONDecoder()
    position, count = 0, 0
    while True:
        gap = _SEPARATORS.match(text, position)
        assert gap is not None
        offset += gap.end() - position  # blanks and commas are one byte each
        position = gap.end()
        if position < len(text) and text[position] == "]":
            return
        try:
            value, end = decoder.raw_decode(text, position)
        except ValueError as error:
            more = file.read(_CHUNK)
            if not more:
                raise _broken(path, f"record {count}", error) from error
            text, position = text[position:] + more, 0
            continue
        record = text[position:end]
        size = len(record) if record.isascii() else len(record.encode())
        yield offset, size, value
        offset, position, count = offset + size, end, count + 1


def _broken(path: Path, place: str, error: Exception) -> UserError:
    return UserError(f"not valid JSON: {error}", where=f"{path}, {place}", cure="repair the file or convert it again")


def _keep(found: RecordFile, kept: Path) -> None:
    extra = {"problems": found.problems, "id_kinds": found.id_kinds, "duplicate_ids": found.duplicate_ids}
    kept.parent.mkdir(parents=True, exist_ok=True)
    aside = kept.with_name(f"{kept.stem}.{os.getpid()}.tmp.npz")
    np.savez(aside, offsets=found.offsets, sizes=found.sizes, lengths=found.lengths, extra=np.array(json.dumps(extra)))
    os.replace(aside, kept)
