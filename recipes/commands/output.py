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
    """A stream that goes nowhere from its first failing write on."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As of any stream."""
        try:
            return self._stream.write(text)
        except OSError:
            _to_nowhere(self._stream)
        return len(text)

    def flush(self) -> None:
        """As of any stream."""
        try:
            self._stream.flush()
        except OSError:
            _to_nowhere(self._stream)


def _to_nowhere(stream: TextIO) -> None:
    """Lets all that is written to a stream from here on go nowhere, what waits in its buffer too."""
    with open(os.devnull, "w") as null:
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
        stack.callback(errors.flush)
        stack.enter_context(contextlib.redirect_stderr(errors))  # type: ignore[type-var]
        if stdout:
            stack.callback(out.flush)
            stack.enter_context(contextlib.redirect_stdout(out))  # type: ignore[type-var]
        yield


@contextlib.contextmanager
def printed() -> Iterator[None]:
    """What runs in here only prints: it ends where its reader leaves. Raises `UserError` where the disk is full."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _to_nowhere(sys.stdout)
    except OSError as error:
        if error.filename is not None:
            raise
        _to_nowhere(sys.stdout)
        problem = f"the output cannot be written: {error.strerror}"
        raise UserError(problem, hint="make room, or write it elsewhere") from error
