"""`draftsmith doctor`: problems of this environment and machine that would spoil a run, each with a hint."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...core.errors import UserError
from ..config.finding import report
from .command import Argument, Command


def _run(options: argparse.Namespace) -> int:
    from ..config.health import look

    if options.ranks is not None and options.ranks < 1:
        raise UserError(f"--ranks {options.ranks}", hint="the processes on one node: 1 or more")
    return report([*look(Path(options.output), options.ranks, online=options.network)])


COMMAND = Command(
    name="doctor",
    summary="check this environment and machine, and say how to fix each fault",
    description="Compare installed versions with the tested ones, and check devices, DeepSpeed and its ops, disk and\n"
    "memory, cores against threads and ranks, Hub and wandb login. The network is used only with --network.\n"
    "Exits with 3 if something must be fixed; warnings alone exit with 0.",
    examples=(
        ("draftsmith doctor", ""),
        ("draftsmith doctor --ranks 8", "do the threads of eight processes fit this node?"),
        ("draftsmith doctor --network", "also: do the Hub (HF_ENDPOINT) and wandb answer?"),
    ),
    arguments=(
        Argument("--ranks", "processes that will run on this node (one for each GPU, or one)", {"type": int}),
        Argument("--output", "folder that runs are written to (runs)", {"default": "runs", "metavar": "FOLDER"}),
        Argument("--network", "also ask the Hub and wandb whether they answer", {"action": "store_true"}),
    ),
    run=_run,
)
