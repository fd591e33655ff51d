"""One of two ranks is stopped, as a debugger, a scheduler or a machine that swaps stops it; some go on in time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from attempts import process
from attempts.attempt import Attempt, Broken, last_words
from attempts.process import Disturbance, Ended
from attempts.two_ranks import must_finish_by_two, start_ranks

_BOUND_MINUTES = 0.1  # of the runs whose stopped rank does not go on
_PAUSE_S = 1.0
_STOP = signal.SIGSTOP


def stopped(attempt: Attempt) -> str:
    """The other rank must name it and end after the bound, or wait until it goes on; the same two then end as if
    nothing had been.
    """
    reference, _, stages = attempt.begin(ranks=2, longest=2)
    arguments, dice = attempt.arguments(reference, stages), attempt.dice
    goes_on, which = dice.random() < 0.25, dice.randrange(2)
    # Rank 0 writes most files: half of its stops come before one of them.
    if which == 0 and not goes_on and dice.random() < 0.5:
        stop = Disturbance(event=dice.randint(1, sum(reference.events[stage] for stage in stages)), number=_STOP)
    else:
        whole = sum(reference.seconds[stage] for stage in stages)
        stop = Disturbance(seconds=0.7 * dice.random() * whole, number=_STOP)
    words = arguments if goes_on else [*arguments, f"engine.wait_minutes={_BOUND_MINUTES}"]
    first, other = _disturbed(attempt, words, which, stop, goes_on)
    attempt.tell(f"rank {which}: {stop}, goes on: {goes_on}: {first.code}, {other.code}")
    if first.says_traceback or other.says_traceback:
        raise Broken(f"a traceback: {last_words(first.text)} / {last_words(other.text)}")
    if other.code == 0:  # it had no need of the stopped rank any more, or that went on
        how = "went on" if goes_on and first.code == 0 else "stopped after the last meeting"
    elif goes_on:
        raise Broken(f"rank {1 - which} ended though the other went on: {last_words(other.text)}")
    else:
        last = other.text.strip().splitlines()[-1]
        names = (f"for rank {which}, which has given no sign", "for the other ranks of 2 to join")
        if other.code != 1 or not last.startswith("error: rank ") or not any(name in last for name in names):
            raise Broken(f"rank {1 - which} ended with {other.code}: {last}")
        how = "ended after the bound, and named"
    must_finish_by_two(attempt, reference, stages, arguments, "again")
    return f"{how}: equal results"


def _disturbed(attempt: Attempt, words: list[str], which: int, stop: Disturbance, goes_on: bool) -> tuple[Ended, Ended]:
    """How the stopped rank and the other one end."""
    log, begin = attempt.folder / "stopped", time.monotonic()
    started = start_ranks([process.command(words)] * 2, attempt.output, log, {which: stop})
    if goes_on:
        time.sleep((stop.seconds or 0.0) + _PAUSE_S)
        while (state := _state(started[which])) == "T":
            os.kill(started[which], signal.SIGCONT)
            time.sleep(0.01)
        attempt.tell(f"after the pause it was {state or 'gone'}")
    logs = [Path(f"{log}-rank-{rank}.txt") for rank in range(2)]
    other = process.wait(started[1 - which], logs[1 - which], begin, 200.0)
    if other.code != 0 or not goes_on:
        with contextlib.suppress(ProcessLookupError):
            os.kill(started[which], signal.SIGKILL)
    return process.wait(started[which], logs[which], begin, 240.0), other


def _state(pid: int) -> str:
    """Of a process, as the kernel names it: T where it is stopped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
