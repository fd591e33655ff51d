"""A log, line by line and within bounded memory; what is no log of one JSON object a line is named for what it is."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..core.errors import UserError
from ..core.files import open_data

MOST_BYTES = 256 << 20  # of a line, its pictures included
_HEAD = 4096
_GZIP = b"\x1f\x8b"
_AS_LINES = "write it as JSON lines, one request with its answer on each"
# How files begin that people take for a log -> what they are, and what to do.
_OTHERS = {
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it first: zstd -d"),
    b"\xfd7zXZ": ("compressed with xz", "unpack it first: xz -d"),
    b"BZh": ("compressed with bzip2", "unpack it first: bzip2 -d"),
    b"PK\x03\x04": ("a zip archive", "unpack it first: unzip"),
    b"PAR1": ("a Parquet table", _AS_LINES),
    b"SQLite format 3": ("an SQLite database", _AS_LINES),
    b"\xff\xfe": ("UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8 LOG > log.jsonl"),
    b"\xfe\xff": ("UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8 LOG > log.jsonl"),
}
_MARK = b"\xef\xbb\xbf"  # a byte order mark of UTF-8


def lines(log: Path) -> Iterator[tuple[int, bytes | None]]:
    """Number, from 1, and bytes of each line that is not blank; None for one of more than `MOST_BYTES`.

    Raises:
        UserError: it is no regular file, cannot be read, or is something else than a log.
    """
    if log.exists() and not log.is_file():
        what = "a folder" if log.is_dir() else "no regular file (a device or a pipe)"
        raise UserError(f"{what}, and a log is a file of JSON lines", where=str(log), hint="write the log to a file")
    with open_data(log) as raw:
        head = raw.read(_HEAD)
        raw.seek(0)
        is_packed = head.startswith(_GZIP)
        try:
            with gzip.open(raw) if is_packed else raw as file:
                _check_kind(file.read(_HEAD), log)  # of the text that was packed
                file.seek(0)
                yield from _lines(file)  # type: ignore[arg-type]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"a damaged gzip file: {error}", where=str(log), hint="copy or pack it again") from error


def _lines(file: BinaryIO | io.BufferedIOBase) -> Iterator[tuple[int, bytes | None]]:
    number = 0
    while line := file.readline(MOST_BYTES + 1):
        number += 1
        line = line.removeprefix(_MARK) if number == 1 else line
        if len(line) > MOST_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 16)
            yield number, None
        elif line.strip():
            yield number, line


def _check_kind(head: bytes, log: Path) -> None:
    """Raises `UserError` that says what the file is, if it cannot be a log."""
    kind = next((what for start, what in _OTHERS.items() if head.startswith(start)), None)
    text = head.removeprefix(_MARK).lstrip()
    first = text.split(b"\n", 1)[0].strip()
    if kind is None and b"\0" in head:
        kind = "binary data", _AS_LINES
    elif text.startswith(b"["):
        kind = "a JSON array", "write each of its items on a line: jq -c '.[]' LOG > log.jsonl"
    elif first == b"{":
        kind = "JSON over several lines", "write each object on one line: jq -c . LOG > log.jsonl"
    elif text.startswith((b"data:", b"event:")):
        kind = "a stream of events, which hold pieces of answers", "log whole answers: requests without `stream`"
    if kind is not None:
        raise UserError(f"{kind[0]}, and a log has one JSON object on each line", where=str(log), hint=kind[1])
