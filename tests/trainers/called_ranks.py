"""A function called by two ranks of gloo, each a process of its own; for tests of what ranks tell each other."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

FORK = multiprocessing.get_context("fork")


def call_two_ranks(folder: Path, work: Callable[[int], Any], *, expected: int = 2, context: Any = FORK) -> dict:
    """Rank -> what `work(rank)` returns.

    Args:
        expected: ranks that answer; the others die.
        context: how processes start. Where an earlier test may have trained, they are no forks of this one, which would
            have a group without its threads.
    """
    told = context.Queue()
    started = [context.Process(target=_rank, args=(number, str(folder / "store"), work, told)) for number in range(2)]
    for process in started:
        process.start()
    answers = dict(told.get(timeout=90) for _ in range(expected))
    for process in started:
        process.join(30)
    return answers


def _rank(number: int, store: str, work: Callable[[int], Any], told: Any) -> None:
    if dist.is_initialized():  # a fork of a test run in which an earlier test began a group
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    try:
        answer = work(number)
    except RuntimeError as error:
        answer = str(error)
    told.put((number, answer))
    dist.destroy_process_group()
