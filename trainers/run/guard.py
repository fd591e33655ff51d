"""One run directory, one run: live ranks lock it, and ranks end with the launcher that started them.

DeepSpeed's runner, told to end on one node, leaves its children running (measured); the same command
started again would then write beside them.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ...core import ranks
from ...core.errors import UserError
from ...core.files import unwritable
from ...core.locks import take_lock

if TYPE_CHECKING:
    from filelock import BaseFileLock

_LOCKS = ".locks"
_PATIENCE_S = 90.0  # an earlier run that was told to stop writes its checkpoint first
_GRACE_S = 60.0
# Words of their command lines.
_LAUNCHERS = ("deepspeed", "draftsmith.trainers.run.launcher", "torchrun", "torch.distributed.run")


class AnotherRun(UserError):
    """A live rank of another run holds the directory. The first rank that notices raises this error."""

    is_said_by_each_rank = True


class RunLock:
    """Held by every rank until its process ends, however it ends.

    Taken before the process group: an earlier run that is still saving holds the group's port as well.
    """

    def __init__(self, output: Path, *, say: Callable[[str], None], patience_s: float = _PATIENCE_S):
        folder = output / _LOCKS
        place = folder / f"rank-{ranks.rank():05d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _take(place, output, say, patience_s)
            # An earlier run may have had more ranks than this one: none of them may live.
            for path in sorted(folder.glob("rank-*")) if ranks.is_main() else ():
                number = path.name.removeprefix("rank-")
                if number.isdigit() and int(number) >= ranks.world_size():
                    _take(path, output, say, patience_s).release()
            place.write_text(str(os.getpid()))
        except OSError as error:
            fault = unwritable(Path(error.filename or output), error)
            raise UserError(fault.problem, key="output", where=fault.where, hint=fault.hint) from error
        atexit.register(self.release)  # keeps the lock as long as the process lives, whoever forgets this object

    def release(self) -> None:
        """Let go of the directory before the process ends."""
        self._lock.release()
        atexit.unregister(self.release)


def _take(path: Path, output: Path, say: Callable[[str], None], patience_s: float) -> BaseFileLock:
    """The lock of one rank. Raises `AnotherRun` where somebody holds it longer than the patience."""
    lock = take_lock(path, timeout_s=0)
    if lock is None:
        holder = path.read_text(encoding="utf-8") or "unknown"
        say(f"waiting for an earlier run of this directory to end (process {holder})")
        lock = take_lock(path, timeout_s=patience_s)
    if lock is None:
        raise AnotherRun(
            f"another run is writing here (process {holder})",
            where=str(output),
            hint="wait until it has ended or end it, or choose another output",
        )
    return lock


def end_with_launcher() -> None:
    """Started by a launcher, this rank asks itself to stop when the launcher or its runner is gone. One that does not
    stop within a minute (its peers are dead, and a collective waits for them) is ended. Exits where they were gone
    before this rank could look: nobody waits for what it would do.
    """
    if (pairs := _launchers()) is None:
        print("the launcher of this rank has ended: nothing is begun", file=sys.stderr, flush=True)
        sys.exit(143)
    if pairs:
        threading.Thread(target=_watch, args=(pairs,), name="end-with-launcher", daemon=True).start()


def _launchers() -> list[tuple[int, int]] | None:
    """(process, its parent) for this process and for DeepSpeed's launcher above it, where a launcher started them.

    None: there was one, and it or DeepSpeed's runner above it has ended already.
    """
    launcher, words = _parent(os.getpid())
    if not any(name in words for name in _LAUNCHERS):
        # DeepSpeed's launcher and ours set the one, which children of a rank inherit, and add the other.
        is_orphan = "CROSS_RANK" in os.environ and any(word.startswith("--local_rank") for word in sys.argv)
        return None if is_orphan else []
    pairs = [(os.getpid(), launcher)]
    if "deepspeed.launcher.launch" not in words:
        return pairs
    runner, words_above = _parent(launcher)
    if "deepspeed" in words_above:
        return [*pairs, (launcher, runner)]
    # On the nodes of a cluster a shell starts the launcher, which is then told its node; else a runner does.
    return pairs if "--node_rank" in words else None


def _parent(process: int) -> tuple[int, str]:
    """The process that started one, and the words of its command: none where it has ended or is another user's."""
    with suppress(psutil.Error):
        if (parent := psutil.Process(process).parent()) is not None:
            return parent.pid, "\n".join(parent.cmdline())
    return 0, ""


def _watch(pairs: list[tuple[int, int]]) -> None:
    def lives(child: int, parent: int) -> bool:
        try:
            return psutil.Process(child).ppid() == parent
        except psutil.Error:
            return False

    while all(itertools.starmap(lives, pairs)):
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(143)
