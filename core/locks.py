"""Locks among processes (filelock): the kernel lets go of one when its process ends, however it ends."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UserError

if TYPE_CHECKING:
    from filelock import BaseFileLock

# What flock answers where a file system has no locks, or its server none to give.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


def take_lock(path: Path, timeout_s: float = -1) -> BaseFileLock | None:
    """Lock a file, which may exist and keeps its content. None: another holder kept it for `timeout_s` seconds; -1
    waits for ever. The lock ends with `release`, or with the last reference to what is returned. Raises `UserError`
    where the file system has no locks.
    """
    from filelock import FileLock, Timeout  # not for `--help`

    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise UserError(
            f"the file system of this folder has no locks ({error.strerror})", where=str(path.parent),
            hint="use a folder on one that has: a local disk, or a network file system with its lock service",
        ) from error  # fmt: skip
    return lock


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file inside the context; waits for ever."""
    lock = take_lock(path)
    assert lock is not None, path
    try:
        yield
    finally:
        lock.release()
