"""Worker processes of a rank that read data: limits their number, and ends them with the rank."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys

import torch


def num_processes() -> int:
    """Processes for one big job. Forked ones alone know what this one knows, and only Linux forks safely."""
    return min(8, len(os.sched_getaffinity(0))) if sys.platform == "linux" else 1


def quiet_worker(worker: int) -> None:
    """Launchers signal the whole process tree: workers outlive the signal so that the step in hand can be saved.

    They die with their parent instead (Linux), so that a killed rank leaves none behind; a rank that ends by an
    exception needs `kill_at_exit`.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = os.getppid()
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def kill_at_exit() -> None:
    """Call after quiet workers were started: Python terminates the remaining ones and then waits for them, possibly for
    ever.
    """
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)  # the last to be registered is the first to run


def _kill_workers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would call it a crash
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
