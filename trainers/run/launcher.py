"""A launcher for one machine that prints no rows: `python -m draftsmith.trainers.run.launcher MODULE WORD ...`.

It starts as many ranks as there are GPUs, at most two, or two on a CPU. Asked to stop, it asks all of them; where one
fails it ends the others, and so does a second Ctrl-C. The exit code is that of the rank that failed first, or 143 where
a stop was asked for before.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time

RANKS = 2
STOPPED = 143
_GRACE_S = 30.0  # for ranks to end after another one has failed


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def num_ranks() -> int:
    """Ranks that are started here: one for each GPU, at most two, or two on a CPU."""
    import torch

    return min(RANKS, torch.cuda.device_count() or os.cpu_count() or 1)


def main(words: list[str]) -> int:
    """Start the ranks of a module, which is the first of the `words`, and wait for them. Returns the exit code."""
    import torch

    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # named: else each rank warns that it has looked for a GPU
    count = str(num_ranks())
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": count, "LOCAL_SIZE": count,
             "CROSS_RANK": "0"}  # fmt: skip
    ranks = []
    for place in map(str, range(int(count))):
        # The word is one that DeepSpeed's launcher adds, too: a rank tells by it that it had one (`guard.py`).
        command = [sys.executable, "-u", "-m", words[0], f"--local_rank={place}", *words[1:]]
        ranks.append(subprocess.Popen(command, env=os.environ | world | {"RANK": place, "LOCAL_RANK": place}))
    code, is_ending, deadline = 0, False, math.inf
    while True:
        running = [rank for rank in ranks if rank.poll() is None]
        ends = [rank.returncode for rank in ranks if rank.returncode]
        code = code or (STOPPED if signals else next(iter(ends), 0))
        if not running:
            break
        if code and not is_ending:
            is_ending = True
            for rank in running:
                rank.terminate()
        # A rank that was asked to stop may save for long; where one failed, the others wait for it.
        stops = (STOPPED, -signal.SIGTERM, -signal.SIGINT) if signals else ()
        if deadline == math.inf and any(end not in stops for end in ends):
            deadline = time.monotonic() + _GRACE_S
        if time.monotonic() > deadline or signals.count(signal.SIGINT) > 1:
            for rank in running:
                rank.kill()
        time.sleep(0.1)
    if code < 0:  # that rank could not say anything itself
        cure = "; where memory runs out the system does this (dmesg tells)" if -code == signal.SIGKILL else ""
        text = f"error: a rank of this run was ended by {signal.Signals(-code).name}{cure}"
        print(f"{text}\n  hint:  the same command continues", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
