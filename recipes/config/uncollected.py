"""Loading, and leaving, without Python's search for garbage in cycles."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for garbage in here. torch and transformers make objects that all stay, and each search walks through
    them again: a fifth of a dry run's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def leave_at_once() -> None:
    """At its exit Python searches for garbage once more, which takes as long as a third of the imports. A command that
    has only read has nothing there that must end well.
    """
    atexit.register(gc.freeze)
