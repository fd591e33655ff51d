"""Ranks: each its own GPU, marks that all find, and waiting for one that works alone: longer than any collective of
training may take, and not for a dead one."""

import os
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from called_ranks import call_two_ranks
from draftsmith.core import ranks
from fails import fails_with

BOUND_S = 0.5  # of the group's own collectives, as DeepSpeed's ten minutes are


def waiting_for(slow):
    """A rank's work, of which rank 0 does `slow` first."""

    def work(number: int):
        ranks.barrier()
        # Only now: on a busy machine two processes need longer to meet.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=BOUND_S))
        if number == 0:
            slow()
        result = ranks.broadcast("uploaded" if number == 0 else None), ranks.gather(number)
        ranks.barrier()
        return result

    return work


def test_rank_0_may_work_alone_for_longer_than_a_collective_waits(tmp_path):
    result = call_two_ranks(tmp_path, waiting_for(lambda: time.sleep(3 * BOUND_S)))
    assert result == {0: ("uploaded", [0, 1]), 1: ("uploaded", [0, 1])}


def test_one_that_dies_is_not_waited_for(tmp_path):
    start = time.monotonic()
    (message,) = call_two_ranks(tmp_path, waiting_for(lambda: os._exit(3)), expected=1).values()
    assert "onnection" in message and time.monotonic() - start < 20


@pytest.mark.parametrize("value", [None, {"a": 1}])
def test_alone(value):
    assert ranks.broadcast(value) == value and ranks.gather(value) == [value]
    ranks.barrier()


def marks(number: int):
    before = ranks.was_told("stop")
    first = [ranks.is_first_to("a note"), ranks.is_first_to("a note")]
    ranks.barrier()  # both have asked, and nothing is told yet
    if number == 1:
        ranks.tell("stop")
    ranks.barrier()
    found = (before, ranks.was_told("stop"), ranks.was_told("another mark"), ranks.any_rank(number == 1),
             ranks.any_rank(False))  # fmt: skip
    ranks.barrier()
    return found, first


def test_a_mark_of_one_rank_is_found_by_both_and_a_note_is_said_by_one(tmp_path):
    answers = call_two_ranks(tmp_path, marks)
    assert {number: found for number, (found, _) in answers.items()} == dict.fromkeys(
        (0, 1), (False, True, False, True, False)
    )
    assert sorted(said for _, first in answers.values() for said in first) == [False, False, False, True]


# GPUs that the node shows, rank on the node, rank of all -> the GPU.
PLACES = {(1, 0, 0): 0, (1, 3, 3): 0, (2, 0, 0): 0, (2, 1, 1): 1, (4, 1, 5): 1, (4, 3, 7): 3}


@pytest.mark.parametrize(("count", "local", "rank"), PLACES)
def test_each_rank_has_the_gpu_of_its_place_on_the_node(monkeypatch, count, local, rank):
    """And the only one, where a launcher shows each rank its own alone."""
    show_gpus(monkeypatch, count, local, rank)
    assert ranks.device() == torch.device("cuda", PLACES[count, local, rank])


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    show_gpus(monkeypatch, 2, 2, 6)
    caught = fails_with(r"rank 6 is number 2 of its node \(from 0\), which shows 2 GPUs", ranks.device)
    assert "start 2 ranks on each node" in caught.hint


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
    assert "--gpus-per-task=1" in fails_with("ranks 1 and 2 have the same GPU, b", gathered, ["b", "b"]).hint
    monkeypatch.setenv("WORLD_SIZE", "1")
    gathered(["b", "b"])  # nobody to share it with


def show_gpus(monkeypatch, count: int, local: int, rank: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # an earlier test may have begun a group
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setenv("RANK", str(rank))
