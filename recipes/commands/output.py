"""Output that cannot be written: its reader has left (`draftsmith ... | head`), or its disk is full.

A run goes on without it, since its log is a file, and its exit code says how it ended. What only prints ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from ...core.errors import UserError


class _Lasting:
    """A stream whose failing writes are left out."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As of any stream."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            to_nowhere(self._stream)
        except OSError:  # a full disk may have room again later
            pass
        return len(text)

    def flush(self, *, last: bool = False) -> None:
        """As of any stream. `last`: what cannot be written now is left out for good, or Python would exit with 120."""
        try:
            self._stream.flush()
        except OSError:
            if last:
                to_nowhere(self._stream)


def to_nowhere(stream: TextIO) -> None:
    """Lets all that is written to a stream from here on go nowhere, what waits in its buffer too."""
    with open(os.devnull, "w", encoding="utf-8") as null:
        os.dup2(null.fileno(), stream.fileno())
    stream.flush()


@contextlib.contextmanager
def lasting_output(*, stdout: bool) -> Iterator[None]:
    """What runs in here goes on when stderr cannot be written.

    Args:
        stdout: nor stdout.
    """
    out, errors = _Lasting(sys.stdout), _Lasting(sys.stderr)
    with contextlib.ExitStack() as stack:
        stack.callback(errors.flush, last=True)
        stack.enter_context(contextlib.redirect_stderr(errors))  # type: ignore[type-var]
        if stdout:
            stack.callback(out.flush, last=True)
            stack.enter_context(contextlib.redirect_stdout(out))  # type: ignore[type-var]
        yield


@contextlib.contextmanager
def printed() -> Iterator[None]:
    """What runs in here only prints: it ends where its reader leaves. Raises `UserError` where the disk is full."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        to_nowhere(sys.stdout)
    except OSError as error:
        if error.filename is not None:
            raise
        to_nowhere(sys.stdout)
        raise UserError(
            f"the output cannot be written: {error.strerror}", hint="make room, or write it elsewhere"
        ) from error
