"""Ranks: each its own GPU, marks that all find, and waiting for one that works alone: longer than any collective of
training may take, and not for a dead one."""

import multiprocessing
import os
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from draftsmith.core import ranks
from draftsmith.core.errors import UserError

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


def marks_of_two(number: int, store: str, said) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    before = ranks.was_told("stop")
    first = [ranks.is_first_to("a note"), ranks.is_first_to("a note")]
    ranks.barrier()  # both have asked, and nothing is told yet
    if number == 1:
        ranks.tell("stop")
    ranks.barrier()
    said.put((number, before, ranks.was_told("stop"), ranks.was_told("another mark"), first,
              ranks.any_rank(number == 1), ranks.any_rank(False)))  # fmt: skip
    ranks.barrier()
    dist.destroy_process_group()


def test_a_mark_of_one_rank_is_found_by_both_and_a_note_is_said_by_one(tmp_path):
    fork = multiprocessing.get_context("fork")
    said = fork.Queue()
    started = [fork.Process(target=marks_of_two, args=(n, str(tmp_path / "store"), said)) for n in range(2)]
    for process in started:
        process.start()
    actual = sorted(said.get(timeout=90) for _ in range(2))
    for process in started:
        process.join(30)
    for number, before, told, other, _, of_one, of_none in actual:
        assert (before, told, other, of_one, of_none) == (False, True, False, True, False), number
    assert sorted(answer for row in actual for answer in row[4]) == [False, False, False, True]


# GPUs that the node shows, rank on the node, rank of all -> the GPU.
PLACES = {(1, 0, 0): 0, (1, 3, 3): 0, (2, 0, 0): 0, (2, 1, 1): 1, (4, 1, 5): 1, (4, 3, 7): 3}


@pytest.mark.parametrize(("count", "local", "rank"), PLACES)
def test_each_rank_has_the_gpu_of_its_place_on_the_node(monkeypatch, count, local, rank):
    """And the only one, where a launcher shows each rank its own alone."""
    show_gpus(monkeypatch, count, local, rank)
    assert ranks.device() == torch.device("cuda", PLACES[count, local, rank])


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    show_gpus(monkeypatch, 2, 2, 6)
    with pytest.raises(UserError, match=r"rank 6 is number 2 of its node \(from 0\), which shows 2 GPUs") as caught:
        ranks.device()
    assert "start 2 ranks on each node" in caught.value.hint


def test_two_ranks_never_share_a_gpu(monkeypatch):
    """As the UUID tells, whatever hosts and containers call themselves."""
    show_gpus(monkeypatch, 1, 0, 0)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid="a", index=gpu.index), raising=False
    )
    asked = []

    def gathered(others):
        monkeypatch.setattr(ranks, "gather", lambda value: asked.append(value) or [value, *others])
        ranks.check_own_gpu()

    gathered(["b", "c"])
    assert asked == ["a"], "its own"
    with pytest.raises(UserError, match="ranks 1 and 2 have the same GPU, b") as caught:
        gathered(["b", "b"])
    assert "--gpus-per-task=1" in caught.value.hint
    monkeypatch.setenv("WORLD_SIZE", "1")
    gathered(["b", "b"])  # nobody to share it with


def show_gpus(monkeypatch, count: int, local: int, rank: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # an earlier test may have begun a group
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setenv("RANK", str(rank))
