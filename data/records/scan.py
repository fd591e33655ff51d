"""Large JSON lists and JSONL, record by record and within bounded memory."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.errors import UserError
from ...core.file_kinds import HEAD, other_kind
from ...core.files import open_data
from ...core.json_types import NO_NUMBER, Json, NotANumber, parse
from .record import Unreadable

CHUNK = 16 << 20  # read at a time
LONGEST = 64 << 20  # characters of a record: one that goes on for longer is broken
_GAP = re.compile(r"[\s,]*")
_LIST = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")

Entry = tuple[int, int, Json]  # first byte, bytes, value


def check_kind(path: Path) -> None:
    """Raises `UserError` that says what the file is, where it is no text."""
    with open_data(path) as file:
        kind = other_kind(file.read(HEAD))
    if kind is not None:
        is_table = kind[0].endswith(("Parquet table", "Arrow table"))
        hint = "tables are read with {kind: datasets, path: ...}" if is_table else kind[1]
        raise UserError(f"{kind[0]}, and records are a JSON list or JSON lines", where=str(path), hint=hint)


def entries(path: Path) -> Iterator[Entry]:
    """Every record. Raises `UserError`, naming the place, where the file is neither a JSON list nor JSONL."""
    with open_data(path) as file:
        bracket = _LIST.match(file.read(4096))
        start = file.seek(bracket.end() if bracket else 0)
        if not bracket:
            yield from _lines(path, file)
            return
        try:
            yield from _list(path, io.TextIOWrapper(file, encoding="utf-8", newline=""), start)
        except UnicodeDecodeError as error:
            raise _not_utf8(str(path), error) from error


def _lines(path: Path, file: Any) -> Iterator[Entry]:
    offset = 0
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                value = read_record(line)
            except UnicodeDecodeError as error:
                raise _not_utf8(f"{path}, line {number}", error) from error
            except ValueError as error:
                raise _broken(path, f"line {number}", _ZEROS if b"\0" in line else error) from error
            yield offset, len(line), value
        offset += len(line)


def read_record(text: bytes) -> Json:
    """The record; with a NaN in it, an `Unreadable`. Raises `ValueError` for other text that is no JSON."""
    try:
        return parse(text)
    except NotANumber as error:
        return Unreadable(error.msg)


_ZEROS = "zero bytes, which a crash or a full disk leaves"


def _list(path: Path, file: Any, offset: int) -> Iterator[Entry]:
    """Decode what follows a list's bracket, holding one chunk at a time."""
    constants: list[str] = []  # NaN and infinity of one record
    decoder = json.JSONDecoder(parse_constant=constants.append)
    text, position, count = "", 0, 0
    while True:
        gap = _GAP.match(text, position)
        assert gap is not None
        offset += gap.end() - position  # blanks and commas are one byte each
        position = gap.end()
        if position < len(text) and text[position] == "]":
            if more := (text[position + 1 :] + file.read(CHUNK)).strip():
                raise _broken(path, f"record {count}", _ZEROS if "\0" in more else "more follows the end of the list")
            return
        constants.clear()
        try:
            value, end = decoder.raw_decode(text, position)
        except RecursionError as error:
            raise _broken(path, f"record {count}", error) from error
        except ValueError as error:
            more = file.read(CHUNK)
            if not more or len(text) - position > LONGEST:
                raise _broken(path, f"record {count}", error) from error
            text, position = text[position:] + more, 0
            continue
        record = text[position:end]
        size = len(record) if record.isascii() else len(record.encode())
        yield offset, size, Unreadable(NO_NUMBER.format(constants[0])) if constants else value
        offset, position, count = offset + size, end, count + 1


def _not_utf8(where: str, error: UnicodeDecodeError) -> UserError:
    hint = "convert the file to UTF-8, for example: iconv -f LATIN1 -t UTF-8 FILE > new.json"
    return UserError(f"not UTF-8: {error}", where=where, hint=hint)


def _broken(path: Path, place: str, error: Exception | str) -> UserError:
    hint = "repair the file, or convert it to a JSON list or JSON lines: jq -c . FILE > records.jsonl"
    return UserError(f"not valid JSON: {error}", where=f"{path}, {place}", hint=hint)
