"""One run directory, one run: live ranks lock it, and ranks end with the launcher that started them.

DeepSpeed's runner, told to end on one node, leaves its children running (measured); the same command
started again would then write beside them.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from ..core import ranks
from ..core.errors import UserError

_LOCKS = ".locks"
_PATIENCE_S = 90.0  # an earlier run that was told to stop writes its checkpoint first
_GRACE_S = 60.0


class AnotherRun(UserError):
    """A live rank of another run holds the directory. The first rank that notices raises this error."""


class RunLock:
    """Held by every rank until its process ends, however it ends: the kernel lets go of the file.

    Taken before the process group: an earlier run that is still saving holds the group's port as well.
    """

    def __init__(self, output: Path, *, say: Callable[[str], None], patience_s: float = _PATIENCE_S):
        folder = output / _LOCKS
        folder.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(folder / f"rank-{ranks.rank():05d}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        holder = self._take(self._handle, patience_s, say)
        if holder is None and ranks.is_main():
            holder = self._others(folder, patience_s, say)
        if holder is not None:
            os.close(self._handle)
            raise AnotherRun(
                f"another run is writing here (process {holder})",
                where=str(output),
                hint="wait until it has ended or end it, or choose another output",
            )
        os.ftruncate(self._handle, 0)
        os.write(self._handle, str(os.getpid()).encode())

    def release(self) -> None:
        """Let go of the directory before the process ends. It can be called once."""
        os.close(self._handle)

    @staticmethod
    def _take(handle: int, patience_s: float, say: Callable[[str], None]) -> str | None:
        """Lock the file, waiting a while; returns who holds it where that fails."""
        start, printed = time.monotonic(), False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                holder = os.pread(handle, 32, 0).decode() or "unknown"
            if time.monotonic() - start > patience_s:
                return holder
            if not printed:
                say(f"waiting for an earlier run of this directory to end (process {holder})")
                printed = True
            time.sleep(0.2)

    @classmethod
    def _others(cls, folder: Path, patience_s: float, say: Callable[[str], None]) -> str | None:
        """An earlier run may have had more ranks than this one: none of them may live."""
        for path in sorted(folder.glob("rank-*")):
            if int(path.name.removeprefix("rank-")) < ranks.world_size():
                continue
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                holder = cls._take(handle, patience_s, say)
            finally:
                os.close(handle)
            if holder is not None:
                return holder
        return None


def end_with_launcher() -> None:
    """Started by DeepSpeed's launcher, this rank asks itself to stop when the launcher or its runner is gone.

    A rank that does not stop within a minute (its peers are dead, and a collective waits for them) is ended.
    """
    parents = _launchers()
    if parents:
        threading.Thread(target=_watch, args=(parents,), name="end-with-launcher", daemon=True).start()


def _launchers() -> list[tuple[int, int]]:
    """(process, its parent) for this process and for the launcher above it, where DeepSpeed started them."""
    pairs: list[tuple[int, int]] = []
    process = psutil.Process()
    for _ in range(2):
        parent = process.parent()
        if parent is None or not any("deepspeed" in word for word in parent.cmdline()):
            break
        pairs.append((process.pid, parent.pid))
        process = parent
    return pairs


def _watch(pairs: list[tuple[int, int]]) -> None:
    while all(_parent(child) == parent for child, parent in pairs):
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(143)


def _parent(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return None
