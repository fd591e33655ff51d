"""A log, line by line and within bounded memory; what is no log of one JSON object a line is named for what it is."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ...core.errors import UserError
from ...core.file_kinds import HEAD, MARK, other_kind
from ...core.files import open_data

MOST_BYTES = 256 << 20  # of a line, its pictures included
_GZIP = b"\x1f\x8b"


def lines(log: Path) -> Iterator[tuple[int, bytes | None]]:
    """Number, from 1, and bytes of each line that is not blank; None for one of more than `MOST_BYTES`.

    Raises:
        UserError: it is no regular file, cannot be read, or is something else than a log.
    """
    if log.exists() and not log.is_file():
        what = "a folder" if log.is_dir() else "no regular file (a device or a pipe)"
        raise UserError(f"{what}, and a log is a file of JSON lines", where=str(log), hint="write the log to a file")
    with open_data(log) as raw:
        head = raw.read(HEAD)
        raw.seek(0)
        is_packed = head.startswith(_GZIP)
        try:
            with gzip.open(raw) if is_packed else raw as file:
                _check_kind(file.read(HEAD), log)  # of the text that was packed
                file.seek(0)
                yield from _lines(file)  # type: ignore[arg-type]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"a damaged gzip file: {error}", where=str(log), hint="copy or pack it again") from error


def _lines(file: BinaryIO | io.BufferedIOBase) -> Iterator[tuple[int, bytes | None]]:
    number = 0
    while line := file.readline(MOST_BYTES + 1):
        number += 1
        line = line.removeprefix(MARK) if number == 1 else line
        if len(line) > MOST_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 16)
            yield number, None
        elif line.strip():
            yield number, line


def _check_kind(head: bytes, log: Path) -> None:
    """Raises `UserError` that says what the file is, if it cannot be a log."""
    kind = other_kind(head)
    text = head.removeprefix(MARK).lstrip()
    first = text.split(b"\n", 1)[0].strip()
    if kind is not None:
        pass
    elif text.startswith(b"["):
        kind = "a JSON array", "write each of its items on a line: jq -c '.[]' LOG > log.jsonl"
    elif first == b"{":
        kind = "JSON over several lines", "write each object on one line: jq -c . LOG > log.jsonl"
    elif text.startswith((b"data:", b"event:")):
        kind = "a stream of events, which hold pieces of answers", "log whole answers: requests without `stream`"
    if kind is not None:
        raise UserError(f"{kind[0]}, and a log has one JSON object on each line", where=str(log), hint=kind[1])
