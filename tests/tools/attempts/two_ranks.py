"""Two ranks: forked like everything else, and now and then under DeepSpeed's launcher, whose processes are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from attempts import process
from attempts.attempt import Attempt, Broken, check_success, last_words, signal_name
from attempts.process import Disturbance, Ended
from attempts.reference import Reference

ROOT = Path(__file__).resolve().parents[3]
Work = Callable[[], int]
_GRACE_S = 75.0  # ranks whose launcher is gone end within a minute


def ranks(attempt: Attempt) -> str:
    """One or both of two forked ranks are killed; the same two then end as if nothing had been."""
    reference, _, stages = attempt.begin(ranks=2, longest=2)
    arguments, dice = attempt.arguments(reference, stages), attempt.dice
    number = dice.choice((signal.SIGKILL, signal.SIGTERM))
    disturbances = {
        rank: Disturbance(seconds=dice.random() * sum(reference.seconds[stage] for stage in stages), number=number)
        for rank in dice.choice(((0,), (1,), (0, 1)))
    }
    ends = run_ranks(attempt, arguments, disturbances)
    for rank, ended in enumerate(ends):
        if ended.says_traceback:
            raise Broken(f"{signal_name(number)}, rank {rank}: {last_words(ended.text)}")
    must_finish_by_two(attempt, reference, stages, arguments, "again")
    return f"{signal_name(number)}: equal results"


def run_ranks(attempt: Attempt, arguments: list[str], disturbances: dict[int, Disturbance]) -> list[Ended]:
    """Two forked ranks of one command."""
    return run_works(attempt, [process.command(arguments)] * 2, disturbances)


def must_finish_by_two(
    attempt: Attempt, reference: Reference, stages: list[str], arguments: list[str], when: str
) -> None:
    """Runs the command by two ranks, which must succeed with the reference's results."""
    for rank, ended in enumerate(run_ranks(attempt, arguments, {})):
        check_success(ended, f"{when}, rank {rank}: ")
    attempt.must_equal(reference, stages)


def run_works(attempt: Attempt, works: Sequence[Work], disturbances: dict[int, Disturbance]) -> list[Ended]:
    """Two forked ranks, each with work of its own."""
    return fork_ranks(works, attempt.output, attempt.folder / f"log-{len(attempt.story)}", disturbances, attempt)


def fork_ranks(
    works: Sequence[Work],
    output: Path,
    log: Path,
    disturbances: dict[int, Disturbance],
    attempt: Attempt | None = None,
) -> list[Ended]:
    """The same, for whoever has no attempt."""
    begin, started = time.monotonic(), start_ranks(works, output, log, disturbances)
    _end_together(started)
    ends = [process.wait(pid, Path(f"{log}-rank-{rank}.txt"), begin, 300.0) for rank, pid in enumerate(started)]
    if attempt is not None:
        attempt.tell(f"two ranks: {disturbances}: exit codes {[ended.code for ended in ends]}")
    return ends


def start_ranks(works: Sequence[Work], output: Path, log: Path, disturbances: dict[int, Disturbance]) -> list[int]:
    """The processes of two ranks; what they print goes to LOG-rank-0.txt and LOG-rank-1.txt."""
    port, started = _free_port(), []
    for rank, work in enumerate(works):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place = Path(f"{log}-rank-{rank}.txt")
        started.append(process.start(work, output, place, disturbance=disturbances.get(rank), environment=own))
    return started


def _end_together(started: list[int]) -> None:
    """As launchers do: where a rank has ended otherwise than well, the other is asked to end, and then made to."""
    asked, end = 0.0, time.monotonic() + _GRACE_S * 3
    while time.monotonic() < end:
        ended = [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in started]
        if all(ended):
            return
        if not asked and any(one and (one.si_code != os.CLD_EXITED or one.si_status) for one in ended):
            asked = time.monotonic()
            time.sleep(1.0)
            _send(started, signal.SIGTERM)
        if asked and time.monotonic() - asked > 30:
            _send(started, signal.SIGKILL)
        time.sleep(0.01)


def _send(processes: list[int], number: int) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def launch(attempt: Attempt) -> str:
    """DeepSpeed's runner, its launcher or a rank is killed, also before the ranks have begun; none may outlive it."""
    reference, _, stages = attempt.begin(ranks=2, longest=3)
    arguments, dice = attempt.arguments(reference, stages), attempt.dice
    number, receiver = dice.choice((signal.SIGKILL, signal.SIGTERM)), dice.choice(("runner", "launcher", "rank"))
    log = attempt.folder / "launched.txt"
    words = ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", _free_port()]
    with open(log, "wb") as written:
        runner = subprocess.Popen(
            [sys.executable, *words, "trains/train.py", *arguments], cwd=ROOT, stdout=written, stderr=written
        )
    # From the runner's own start to the middle of the stages.
    time.sleep(dice.uniform(0.5, 15.0))
    victim = _victim(runner, receiver)
    attempt.tell(f"{signal_name(number)} to {receiver}, process {victim}")
    if victim is not None:
        os.kill(victim, number)
    _all_gone(runner)
    must_finish_by_two(attempt, reference, stages, arguments, f"after {signal_name(number)} to the {receiver}")
    return f"{signal_name(number)} to the {receiver}: equal results"


def _victim(runner: subprocess.Popen[bytes], receiver: str) -> int | None:
    """The process that gets the signal, or the one above it where it has not begun; None: all has ended."""
    if runner.poll() is not None:
        return None
    chain = [runner.pid]
    try:
        below = psutil.Process(runner.pid).children()
        if below:
            chain.append(below[0].pid)
            chain += [child.pid for child in below[0].children()][-1:]
    except psutil.Error:
        pass
    return chain[min({"runner": 0, "launcher": 1, "rank": 2}[receiver], len(chain) - 1)]


def _all_gone(runner: subprocess.Popen[bytes]) -> None:
    """Waits until no process of the launch lives. Raises `Broken` where one goes on."""
    end = time.monotonic() + _GRACE_S
    while time.monotonic() < end:
        runner.poll()
        alive = process.survivors()
        if not alive:
            return
        time.sleep(0.2)
    told = [" ".join(one.cmdline()[:4]) for one in alive]
    for one in alive:
        one.kill()
    raise Broken(f"{len(told)} processes live on {_GRACE_S:.0f} s after the kill: {told[0]}")


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
