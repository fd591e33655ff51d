"""DeepSpeed's launcher for one machine without its rows: `python -m draftsmith.trainers.run.launcher MODULE WORD ...`.

It starts as many ranks as there are GPUs, at most two, or two on a CPU. Signals and exit codes are DeepSpeed's but
for a run that was asked to stop: 143, as without a launcher. Warnings and errors that DeepSpeed logs are printed, and
so is the death of a rank that could not say anything itself.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import runpy
import signal
import socket
import sys

RANKS = 2
STOPPED = 143


class Heard(logging.Filter):
    """A filter of DeepSpeed's logger: lets through what is no mere progress, and notes that a stop was asked for."""

    asked_to_stop = False

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        self.asked_to_stop |= text.startswith("Main process received SIG")
        # The last but says that a rank has ended: it has told why, or `ending` does.
        return record.levelno >= logging.WARNING and "exits with return code" not in text


def ending(code: object, heard: Heard) -> tuple[int, str]:
    """The exit code of the launcher's, and what is still to be said; "" where the ranks have said all."""
    number = code if isinstance(code, int) else int(code is not None)
    if heard.asked_to_stop:
        return STOPPED, ""
    if number >= 0:
        return number, ""
    name = signal.Signals(-number).name
    cure = "; where memory runs out the system does this (dmesg tells)" if -number == signal.SIGKILL else ""
    return 128 - number, f"error: a rank of this run was ended by {name}{cure}\n  hint:  the same command continues"


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def num_ranks() -> int:
    """Ranks that are started here: one for each GPU, at most two, or two on a CPU."""
    import torch

    return min(RANKS, torch.cuda.device_count() or os.cpu_count() or 1)


def main(words: list[str], *, verbose: bool) -> int:
    """Start the ranks of a module, which is the first of the `words`, and wait for them. Returns the exit code."""
    import torch

    gpus, count = torch.cuda.device_count(), num_ranks()
    if not gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # named: else each process warns that it has looked for a GPU
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "") if gpus else ""
    devices = shown.split(",")[:count] if shown else list(range(count))
    world = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
    # The number of the node says that no runner of DeepSpeed's stands above (`trainers/run/guard.py`).
    place = [f"--world_info={world}", "--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    sys.argv = ["deepspeed.launcher.launch", *place, "--module", *words]
    heard = Heard()
    if not verbose:
        logging.getLogger("DeepSpeed").addFilter(heard)
    try:
        runpy.run_module("deepspeed.launcher.launch", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code, text = ending(ended.code, heard)
        if text:
            print(text, file=sys.stderr, flush=True)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], verbose="verbose=true" in sys.argv))
