"""Output that cannot be written: its reader has left (`draftsmith ... | head`), or its disk is full.

A command goes on without it: a run's log is a file, its exit code says how it ended, and `| head` is no error.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class Lasting:
    """A stream whose failing writes are left out. `lost`: why the last of them failed."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.lost: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As of any stream."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self, *, last: bool = False) -> None:
        """As of any stream. `last`: what cannot be written now is left out for good, or Python would exit with 120."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error, last)

    def _lose(self, error: OSError, last: bool = False) -> None:
        self.lost = error
        if last or isinstance(error, BrokenPipeError):  # a full disk may have room again later
            with open(os.devnull, "w", encoding="utf-8") as null:
                os.dup2(null.fileno(), self._stream.fileno())
            self._stream.flush()  # what waits in its buffer, too


@contextlib.contextmanager
def lasting_output() -> Iterator[Lasting]:
    """What runs in here goes on when stdout or stderr cannot be written. Gives stdout."""
    with open(os.devnull, "w", encoding="utf-8") as null:  # for a stream that was closed before the start (`>&-`)
        out, errors = Lasting(sys.stdout or null), Lasting(sys.stderr or null)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):  # type: ignore[type-var]
            try:
                yield out
            finally:
                out.flush(last=True)
                errors.flush(last=True)
