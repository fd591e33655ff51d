"""Disks that are full at a chosen moment, or of a size that is not enough."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from attempts import process
from attempts.attempt import Attempt, Broken, check_refusal
from attempts.process import Disturbance
from attempts.reference import Reference

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS: what this attempt mounts ends with it
_BYTES = 160_000_000  # more than what the project wants to be left free
_WORDS = ("space", "full", "room", "cannot be written", "bytes", "too large")


def disk(attempt: Attempt) -> str:
    """The disk fills up before a change of the folder; once there is room, the same command ends with equal results."""
    reference = attempt.reference()
    finished, stages = attempt.window(reference)
    attempt.output = attempt.folder / "disk" / "run"
    small = own_disk(attempt.output.parent)
    try:
        return _fill(attempt, reference, finished, stages, small)
    except Broken:
        shutil.copytree(attempt.output.parent, attempt.folder / "kept")  # the disk itself goes with this process
        raise


def _fill(attempt: Attempt, reference: Reference, finished: list[str], stages: list[str], small: bool) -> str:
    reference.copy(attempt.output, finished)
    arguments = attempt.arguments(reference, stages)
    event = attempt.dice.randint(1, sum(reference.events[stage] for stage in stages))
    if small:
        leave = attempt.dice.choice((0, 0, 4096, 20_000, 100_000))
        ended = attempt.run(arguments, Disturbance(event=event, fill=leave))
        (attempt.output.parent / "ballast").unlink(missing_ok=True)
    else:
        limit = attempt.dice.choice((1000, 20_000, 60_000))
        ended = attempt.work(_limited(arguments, limit), f"with files of at most {limit} bytes")
    if ended.code != 0:
        check_refusal(ended, *_WORDS)
    attempt.must_finish(reference, arguments, stages)
    how = "said" if ended.code else "enough room"
    return f"{how} ({'a full disk' if small else 'a limit on files'})"


def own_disk(folder: Path, *, size: int = _BYTES) -> bool:
    """Mounts a small disk of its own over a new folder, for this process and its children. False: not allowed."""
    folder.mkdir(parents=True)
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(_NEW_MOUNTS) != 0:
        return False
    mounts = (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)])
    return all(subprocess.run(words, capture_output=True, check=False).returncode == 0 for words in mounts)


def _limited(arguments: list[str], limit: int) -> Callable[[], int]:
    """The command under a limit on the size of files, where no disk may be mounted."""
    work = process.command(arguments)

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return work()

    return limited
