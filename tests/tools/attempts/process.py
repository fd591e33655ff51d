"""One command in a process of its own, forked from one that has imported everything, and what may befall it on the way.

The disturbance lives in the forked process: an audit hook sees every file that Python opens for writing, renames or
removes under the watched folder, and acts before the n-th of them. The project's code knows nothing of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Audit events that change a folder; their first argument is a path.
_EVENTS = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}
_WRITES = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class Disturbance:
    """What happens to a command.

    Args:
        event: before this event of writing, from 1; None: after `seconds`.
        number: the signal that the process gets.
    """

    event: int | None = None
    seconds: float | None = None
    number: int | None = None


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Args:
        code: exit code; minus the signal's number where a signal ended it; None: it was still running at its limit.
        text: what it printed.
        events: how often it changed the watched folder.
        reached: the clock's time at which the disturbance came; None: the command ended before.
    """

    code: int | None
    text: str
    events: int
    reached: float | None
    seconds: float

    @property
    def says_traceback(self) -> bool:
        """Whether a traceback was printed."""
        return "Traceback (most recent call last)" in self.text


def run(
    work: Callable[[], int], watched: Path, log: Path, *, disturbance: Disturbance | None = None, limit_s: float = 120.0
) -> Ended:
    """Runs `work` in a fork, with its output in `log`, and waits for its end.

    Args:
        watched: the folder whose events count.
    """
    begin = time.monotonic()
    log.unlink(missing_ok=True)
    Path(f"{log}.events").write_text("")
    pid = os.fork()
    if pid:
        return _wait(pid, log, begin, limit_s)
    code = 70
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(written, stream)
        os.chdir(watched.parent)
        counter = Counter(watched, Path(f"{log}.events"), disturbance or Disturbance())
        counter.begin()
        code = work()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except KeyboardInterrupt:
        # Between the command's last line and the end of its process.
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def _wait(pid: int, log: Path, begin: float, limit_s: float) -> Ended:
    """Waits for a fork; past its limit it is ended."""
    code: int | None = None
    while time.monotonic() - begin < limit_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # also what it has left behind
    if code is None:
        os.waitpid(pid, 0)
    count, at = Path(f"{log}.events").read_text().split() or ("0", "0")
    text = log.read_text(errors="replace") if log.is_file() else ""
    return Ended(code, text, int(count), float(at) or None, time.monotonic() - begin)


class Counter:
    """Counts this process's changes of a folder, and disturbs it before one of them or after a time."""

    def __init__(self, watched: Path, state: Path, disturbance: Disturbance):
        self._watched, self._disturbance = str(watched.absolute()), disturbance
        self._count, self._busy, self._reached = 0, False, 0.0
        self._state = os.open(state, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._write()

    def begin(self) -> None:
        """From here on. The hook cannot be taken away, and ends with the process."""
        sys.addaudithook(self._hook)
        flush = os.fsync

        def fsync(handle: Any) -> None:
            self._note()
            flush(handle)

        os.fsync = fsync  # type: ignore[assignment]
        if self._disturbance.seconds is not None:
            timer = threading.Timer(self._disturbance.seconds, self._act)
            timer.daemon = True
            timer.start()

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES and self._inside(path):
                self._note()
        elif event in _EVENTS and self._inside(arguments[0]):
            self._note()

    def _inside(self, path: Any) -> bool:
        if self._busy or not isinstance(path, str | bytes | os.PathLike):
            return False
        return os.path.abspath(os.fsdecode(path)).startswith(self._watched)

    def _note(self) -> None:
        if self._busy:
            return
        self._count += 1
        self._write()
        if self._count == self._disturbance.event:
            self._act()

    def _act(self) -> None:
        self._busy, self._reached = True, time.time()
        self._write()
        if self._disturbance.number is not None:
            os.kill(os.getpid(), self._disturbance.number)
        self._busy = False

    def _write(self) -> None:
        os.pwrite(self._state, f"{self._count} {self._reached}   ".encode(), 0)


def command(arguments: Sequence[str]) -> Callable[[], int]:
    """`draftsmith ARGUMENTS` as work for `run`."""

    def work() -> int:
        from draftsmith.recipes.commands.cli import main

        sys.argv = ["draftsmith", *arguments]
        return main(list(arguments))

    return work
