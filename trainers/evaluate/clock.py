"""Whose seconds an evaluation counts: the wall's, or those of the thread that decodes.

Other work on the machine stretches the wall's seconds, now more and now less. The thread's own are those that the
processor spent on it: on one thread of a CPU that is all of the work.
"""

from __future__ import annotations

import time
from typing import Literal

import torch

from ...core.errors import UserError
from ...eval.loop import Clock
from ...models.targets.base import Target

ClockName = Literal["wall", "thread"]


def clock_of(name: ClockName, target: Target) -> Clock | None:
    """None: the loop's own, the wall's. Raises `UserError` where the decoding thread does not do all of the work."""
    if name == "wall":
        return None
    device, threads = target.device, torch.get_num_threads()
    if device.type != "cpu" or threads > 1:
        where = f"{threads} threads" if device.type == "cpu" else str(device)
        raise UserError(f"clock: thread counts the seconds of one thread, and decoding runs on {where}",
                        where="clock",
                        hint="start with OMP_NUM_THREADS=1 on a CPU, or leave clock out")  # fmt: skip
    return time.thread_time
