"""Locks among processes: the kernel's (flock), or on file systems that have none a file that is made exclusively.

Such a file names its host and process, and its owner touches it every few seconds: the heartbeat. It is taken over at
once where its process is dead on this host, and where its heart has not beaten for a while. Times of two machines are
never compared: whoever waits watches whether the file changes.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .files import NotRegular, open_regular
from .json_types import JsonObject, object_at

# What flock answers where a file system has no locks, or its server none to give.
NO_FLOCK = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
BEAT_S = 10.0
STALE_S = 60.0  # without a heartbeat; below the patience of a run's lock


def let_libraries_lock() -> None:
    """Lets filelock (huggingface_hub, datasets) lock by a file of its own on every file system without flock.

    It does so where flock answers ENOSYS, and fails where a file system says the same in other words.
    """
    if not isinstance(fcntl.flock, _PlainFlock):
        fcntl.flock = _PlainFlock(fcntl.flock)


@dataclass(frozen=True)
class _PlainFlock:
    flock: Callable[[Any, int], None]

    def __call__(self, handle: Any, operation: int) -> None:
        try:
            self.flock(handle, operation)
        except OSError as error:
            if error.errno in NO_FLOCK:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from error
            raise


class Lock:
    """Exclusive, held by one process. The kernel lets go of it when the process ends, however it ends.

    Args:
        path: of a file that may exist; its content is nobody's business but the caller's.
        lost: called in a thread when somebody else took over a lock whose heart seemed to have stopped (the process
            was suspended, say).
    """

    def __init__(self, path: Path, *, lost: Callable[[], None] = lambda: None):
        self.path, self._lost = path, lost
        self._handle: int | None = None
        self._owned: _HeldFile | None = None

    @property
    def by_file(self) -> bool:
        """Whether this lock is a file with a heartbeat."""
        return self._owned is not None

    def take(self, patience_s: float | None = None, waiting: Callable[[str], None] = lambda holder: None) -> str | None:
        """Take the lock. Returns None, or who holds it after so long.

        Args:
            patience_s: None: for ever.
            waiting: told once who holds it.
        """
        start, told = time.monotonic(), False
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        held = _HeldFile(self.path.with_name(f"{self.path.name}.held"), self._lost)
        while (holder := self._attempt(held)) is not None:
            if patience_s is not None and time.monotonic() - start > patience_s:
                self._close()
                return holder
            if not told:
                waiting(holder)
                told = True
            time.sleep(0.2 if patience_s is not None else 0.02)
        return None

    def sign(self) -> None:
        """Write this process into the file, for whoever waits."""
        if self._handle is not None:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Let go before the process ends."""
        if self._owned is not None:
            self._owned.release()
            self._owned = None
        self._close()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it inside the context; waits for ever."""
        self.take()
        try:
            yield
        finally:
            self.release()

    def _attempt(self, held: _HeldFile) -> str | None:
        assert self._handle is not None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            return os.pread(self._handle, 32, 0).decode(errors="replace").strip() or "unknown"
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
        if (holder := held.attempt()) is None:
            self._owned = held
        return holder

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class _HeldFile:
    """A file that exists while its owner lives, and changes as long as it does."""

    def __init__(self, path: Path, lost: Callable[[], None]):
        self.path, self._lost = path, lost
        self._text = json.dumps(_about_us() | {"token": uuid.uuid4().hex}).encode()
        self._seen: tuple[bytes, int] | None = None
        self._since = 0.0
        self._ended = threading.Event()

    def attempt(self) -> str | None:
        """Take it where it is free or abandoned; returns who holds it."""
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            seen = self._read()
            if seen is None or not self._is_abandoned(seen) or not self._take_over(seen[0]):
                return _holder(seen[0] if seen is not None else b"")
        else:
            os.write(handle, self._text)
            os.close(handle)
        atexit.register(self.release)
        threading.Thread(target=self._beat, name="lock-heartbeat", daemon=True).start()
        return None

    def release(self) -> None:
        """Remove the file, unless it is another's by now."""
        self._ended.set()
        atexit.unregister(self.release)
        seen = self._read()
        if seen is not None and seen[0] == self._text:
            self.path.unlink(missing_ok=True)

    def _read(self) -> tuple[bytes, int] | None:
        # Opened, and not only looked at: NFS then asks its server.
        with suppress(FileNotFoundError, NotRegular), open_regular(self.path) as file:
            return file.read(1024), os.fstat(file.fileno()).st_mtime_ns
        return None

    def _is_abandoned(self, seen: tuple[bytes, int]) -> bool:
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        if _is_dead(seen[0]):
            return True
        return time.monotonic() - self._since > STALE_S

    def _take_over(self, text: bytes) -> bool:
        """Put our file in the place of an abandoned one. Of several that wait one alone gets its mark."""
        mark = self.path.with_name(f"{self.path.name}.{_about(text).get('token', 'unreadable')}.taken")
        try:
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except FileExistsError:
            if time.monotonic() - self._since > 2 * STALE_S:  # whoever made the mark died on the way
                mark.unlink(missing_ok=True)
            return False
        try:
            now = self._read()
            if now is None or now[0] != text:
                return False  # another was quicker
            aside = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}.partial")
            aside.write_bytes(self._text)
            os.replace(aside, self.path)
            return True
        finally:
            mark.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            seen = self._read()
            if seen is not None and seen[0] != self._text:
                self._lost()
                return
            with suppress(OSError):  # a disk that is away for a moment
                os.utime(self.path)


def _about_us() -> JsonObject:
    """This process. The namespace tells containers apart that have one host's name and process numbers of their own."""
    namespace = Path("/proc/self/ns/pid")
    within = os.readlink(namespace) if namespace.exists() else ""
    started = psutil.Process().create_time()
    return {"host": socket.gethostname(), "within": within, "pid": os.getpid(), "started": started}


def _about(text: bytes) -> JsonObject:
    try:
        return object_at(json.loads(text)) or {}
    except (ValueError, RecursionError):  # being written, or cut
        return {}


def _is_dead(text: bytes) -> bool:
    """Whether a file's process ran here and has ended; its number may be another's by now."""
    about, ours = _about(text), _about_us()
    if not about or (about.get("host"), about.get("within")) != (ours["host"], ours["within"]):
        return False
    try:
        return abs(psutil.Process(int(about["pid"])).create_time() - float(about["started"])) > 2
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return True


def _holder(text: bytes) -> str:
    about = _about(text)
    return f"{about.get('pid', 'unknown')} on {about.get('host', 'an unknown host')}"
