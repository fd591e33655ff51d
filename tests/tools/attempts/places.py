"""Odd places: names, links, disks that cannot be written or locked, other users, two runs at once, moved folders."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

from attempts import process
from attempts.attempt import Attempt, Broken, check_refusal, check_success
from attempts.disks import own_disk
from attempts.kills import draw_kill
from attempts.reference import Reference

_NAMES = (
    "with spaces", "ü 漢字 🙂", "it's \"quoted\"", "#hash %percent", "a=b", "[list]", "{braces}", "-dash", "${seed}",
    "~", "x" * 200, "a,b", "line\nbreak", "back\\slash", "trailing ", ".hidden", "deep/er/and/deeper",
)  # fmt: skip
_NOBODY = 65534


def place(attempt: Attempt) -> str:
    """One of the odd places below, drawn."""
    name = attempt.dice.choice(sorted(_PLACES))
    attempt.tell(f"place: {name}")
    return f"{name}: {_PLACES[name](attempt)}"


def _window(attempt: Attempt) -> tuple[Reference, list[str], list[str]]:
    reference = attempt.reference()
    finished, stages = attempt.window(reference, longest=2)
    return reference, finished, stages


def _odd_name(attempt: Attempt) -> str:
    """Runs there, or is refused with a message."""
    reference, finished, stages = _window(attempt)
    attempt.output = attempt.folder / attempt.dice.choice(_NAMES)
    reference.copy(attempt.output, finished)
    output = str(attempt.output) if attempt.dice.random() < 0.5 else str(attempt.output.relative_to(attempt.folder))
    value = f"'{output}'" if "'" not in output else output
    arguments = [f"recipe={reference.recipe}", f"output={value}", f"stages=[{','.join(stages)}]"]
    ended = attempt.run(arguments, cwd=attempt.folder)
    if ended.code == 2:
        check_refusal(ended)
        return "refused"
    check_success(ended)
    attempt.must_equal(reference, stages)
    return "equal results"


def _linked(attempt: Attempt) -> str:
    reference, finished, stages = _window(attempt)
    reference.copy(attempt.folder / "elsewhere", finished)
    attempt.output.symlink_to(attempt.folder / "elsewhere")
    attempt.must_finish(reference, attempt.arguments(reference, stages), stages)
    return "equal results"


def _is_file(attempt: Attempt) -> str:
    """The output, a stage's folder or the folder of locks is a file."""
    reference, _, stages = attempt.begin(longest=2)
    path = attempt.dice.choice((attempt.output, attempt.output / stages[0], attempt.output / ".locks"))
    if path == attempt.output:
        shutil.rmtree(path)
    path.write_text("")
    ended = attempt.run(attempt.arguments(reference, stages))
    check_refusal(ended, path.name)
    return "refused by name"


def _read_only(attempt: Attempt) -> str:
    """A disk that is mounted read-only."""
    reference, finished, stages = _window(attempt)
    attempt.output = attempt.folder / "disk" / "run"
    if not own_disk(attempt.output.parent):
        return "not tried: no right to mount"
    reference.copy(attempt.output, finished)
    subprocess.run(["mount", "-o", "remount,ro", str(attempt.output.parent)], check=True)
    check_refusal(attempt.run(attempt.arguments(reference, stages)), str(attempt.output))
    return "refused by name"


def _other_user(attempt: Attempt) -> str:
    """A run that may not be written by whoever starts it."""
    if os.geteuid() != 0:
        return "not tried: no right to give a folder away"
    reference, _, stages = attempt.begin(longest=2)
    for path in (attempt.output, *attempt.output.rglob("*")):
        os.chown(path, _NOBODY, _NOBODY)
    work = _as_owner_alone(process.command(attempt.arguments(reference, stages)))
    check_refusal(attempt.work(work, "as somebody who may not write"), str(attempt.output))
    return "refused by name"


def _their_data(attempt: Attempt) -> str:
    """Data that may be read alone, beside an output that may be written."""
    reference = attempt.references.get("lvlm")
    if reference is None:
        return "not tried: no recipe with such data"
    reference.copy(attempt.output, ["world"])
    world = attempt.folder / "data"
    shutil.copytree(reference.folder / "world" / "world", world)
    for path in (world, *world.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    setting = f"stages.target.data={{from: null, path: {world / 'train.json'}, aspect: square, max_length: 192}}"
    work = _as_owner_alone(process.command(attempt.arguments(reference, ["target"], setting)))
    ended = attempt.work(work, "data that may only be read")
    check_success(ended)
    return "read"


def _as_owner_alone(work: Callable[[], int]) -> Callable[[], int]:
    """The same without root's right to pass over permissions: capabilities 1 to 3 of Linux are given up."""

    def run() -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        libc.capget(header, data)
        for place in range(3):  # effective, permitted, inheritable
            data[place] &= ~0b1110
        assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())
        return work()

    return run


def _no_locks(attempt: Attempt) -> str:
    """A disk whose system calls for locks are not there."""
    reference, _, stages = attempt.begin(longest=2)
    arguments, number = attempt.arguments(reference, stages), attempt.dice.choice((errno.ENOSYS, errno.ENOLCK))
    ended = attempt.work(_without_flock(process.command(arguments), number), f"without flock, error {number}")
    check_refusal(ended, "has no locks")
    return "refused"


def _without_flock(work: Callable[[], int], number: int) -> Callable[[], int]:
    def run() -> int:
        import fcntl

        def refuse(*arguments: Any) -> None:
            raise OSError(number, os.strerror(number))

        fcntl.flock = fcntl.lockf = refuse  # type: ignore[assignment]
        return work()

    return run


def _twice(attempt: Attempt) -> str:
    """The same command twice at once: one waits or says who holds the folder, and the results are one run's."""
    reference, _, stages = attempt.begin(longest=2)
    work = process.command(attempt.arguments(reference, stages))
    logs = [attempt.folder / f"log-{name}.txt" for name in "ab"]
    begin = time.monotonic()
    started = []
    for log in logs:
        started.append(process.start(work, attempt.output, log))
        time.sleep(attempt.dice.choice((0.0, 0.05, 0.5)))
    ends = [process.wait(pid, log, begin, 200.0) for pid, log in zip(started, logs, strict=True)]
    for ended in ends:
        attempt.tell(f"exit code {ended.code}: {ended.text[-300:]}")
        if ended.code != 0:
            check_refusal(ended, "another run")
    if all(ended.code for ended in ends):
        raise Broken("neither of two runs at once came to its end")
    attempt.must_equal(reference, stages)
    return "equal results"


def _moved(attempt: Attempt) -> str:
    """The folder is moved after a kill."""
    reference, _, stages = attempt.begin(longest=2)
    attempt.run(attempt.arguments(reference, stages), draw_kill(attempt, reference, stages))
    moved = attempt.folder / "moved"
    if attempt.output.exists():
        os.replace(attempt.output, moved)
    attempt.output = moved
    attempt.must_finish(reference, attempt.arguments(reference, stages), stages)
    return "equal results"


def _no_home(attempt: Attempt) -> str:
    """No home, no temporary folder."""
    reference, _, stages = attempt.begin(longest=2)
    away = {name: "/nonexistent" for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME")}
    attempt.must_finish(reference, attempt.arguments(reference, stages), stages, environment=away)
    return "equal results"


def _left_lock(attempt: Attempt) -> str:
    """What a killed run left: a lock of a process that is gone, or a folder in the lock's place."""
    reference, _, stages = attempt.begin(longest=2)
    lock = attempt.output / ".locks" / "rank-00000"
    lock.parent.mkdir()
    if attempt.dice.random() < 0.5:
        lock.write_text("999999")
        attempt.must_finish(reference, attempt.arguments(reference, stages), stages)
        return "equal results"
    lock.mkdir()
    check_refusal(attempt.run(attempt.arguments(reference, stages)), ".locks")
    return "refused by name"


_PLACES: dict[str, Callable[[Attempt], str]] = {
    "odd name": _odd_name, "linked folder": _linked, "a file in a folder's place": _is_file,
    "read-only disk": _read_only, "no right to write": _other_user, "data of another user": _their_data,
    "no locks": _no_locks, "two at once": _twice, "moved after a kill": _moved, "no home": _no_home,
    "a lock left behind": _left_lock,
}  # fmt: skip
