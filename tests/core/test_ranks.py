"""Ranks that wait for one that works alone: longer than any collective of training may take, and not for a dead one."""

import multiprocessing
import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from draftsmith.core import ranks

BOUND_S = 0.5  # of the group's own collectives, as DeepSpeed's ten minutes are


def rank_of_two(number: int, store: str, slow, told) -> None:
    if dist.is_initialized():  # a fork of a test run in which an earlier test began a group
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    ranks.barrier()
    # Only now: on a busy machine two processes need longer to meet.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=BOUND_S))
    if number == 0:
        slow()
    try:
        result = ranks.broadcast("uploaded" if number == 0 else None), ranks.gather(number)
        ranks.barrier()
        told.put((number, result))
        dist.destroy_process_group()
    except RuntimeError as error:
        told.put((number, str(error)))


def two_ranks(folder, slow, expected: int):
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    started = [fork.Process(target=rank_of_two, args=(n, str(folder / "store"), slow, told)) for n in range(2)]
    for process in started:
        process.start()
    actual = dict(told.get(timeout=90) for _ in range(expected))
    for process in started:
        process.join(30)
    return actual


def test_rank_0_may_work_alone_for_longer_than_a_collective_waits(tmp_path):
    result = two_ranks(tmp_path, lambda: time.sleep(3 * BOUND_S), 2)
    assert result == {0: ("uploaded", [0, 1]), 1: ("uploaded", [0, 1])}


def test_one_that_dies_is_not_waited_for(tmp_path):
    start = time.monotonic()
    (message,) = two_ranks(tmp_path, lambda: os._exit(3), 1).values()
    assert "onnection" in message and time.monotonic() - start < 20


@pytest.mark.parametrize("value", [None, {"a": 1}])
def test_alone(value):
    assert ranks.broadcast(value) == value and ranks.gather(value) == [value]
    ranks.barrier()
