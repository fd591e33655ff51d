"""Requests are dealt to ranks from one queue, the longest first: how long ranks wait, and what a killed run leaves."""

import heapq
import itertools
import json
import random
from functools import partial

import pytest
from called_ranks import call_two_ranks
from draftsmith.core import ranks
from draftsmith.trainers.evaluate.resume_log import dealt, resumed_in_turn, units
from draftsmith.trainers.run.stopping import Stop
from ranks_run import FORKS

REQUESTS, RANKS, METHODS = 600, 8, 10


@pytest.fixture
def together(monkeypatch):
    """One process as a number of ranks that share a store, and nothing else."""

    def begin(world_size):
        counters = {}
        monkeypatch.setattr(ranks, "world_size", lambda: world_size)
        monkeypatch.setattr(ranks, "broadcast", lambda value: "queue" if isinstance(value, str) else value)
        monkeypatch.setattr(ranks, "draw", lambda name: next(counters.setdefault(name, itertools.count())))

    return begin


def schedule(seed):
    """[requests] words of each conversation and seconds of its request: one plain answer and ten drafted ones, whose
    lengths follow the data's answer roughly.
    """
    draw = random.Random(seed)
    words = [draw.lognormvariate(4.5, 0.8) for _ in range(REQUESTS)]
    speeds = [1.0, *(draw.uniform(0.3, 0.8) for _ in range(METHODS))]
    seconds = [sum(0.02 * n * draw.lognormvariate(0, 0.3) * speed for speed in speeds) for n in words]
    return words, seconds


def idle_share(busy, ends):
    """Of the time of all ranks until the last one ends, what they wait."""
    return 1 - sum(busy) / (len(busy) * max(ends))


def drawn_share(queue, seconds):
    """The idle share where each rank draws as soon as it is free; also which rank did what."""
    queues = [dealt(queue, lambda count: None, in_step=False) for _ in range(RANKS)]
    free, busy, did = [(0.0, rank) for rank in range(RANKS)], [0.0] * RANKS, [[] for _ in range(RANKS)]
    ends = [0.0] * RANKS
    while free:
        now, rank = heapq.heappop(free)
        if (item := next(queues[rank], None)) is None:
            continue
        did[rank].append(item)
        busy[rank] += seconds[item[1]]
        ends[rank] = now + seconds[item[1]]
        heapq.heappush(free, (ends[rank], rank))
    return idle_share(busy, ends), did


@pytest.mark.parametrize("seed", range(5))
def test_ranks_hardly_wait_for_one_another(together, seed):
    """600 requests of ten methods on eight ranks: under 3%, where shares by stride would leave over 8%."""
    together(RANKS)
    words, seconds = schedule(seed)
    queue = units([range(REQUESTS)], lambda part, index: words[index])
    waited, did = drawn_share(queue, seconds)
    assert sorted(itertools.chain(*did)) == [(0, index) for index in range(REQUESTS)], "each is done once"
    assert waited < 0.03
    by_stride = [sum(seconds[rank::RANKS]) for rank in range(RANKS)]
    assert idle_share(by_stride, by_stride) > 0.08 > 2 * waited


def test_a_rank_that_ends_early_helps(together):
    """One rank is held up in its first request by as much as all others take: they do the rest."""
    together(RANKS)
    seconds = [100.0] + [1.0] * (REQUESTS - 1)
    waited, did = drawn_share(units([range(REQUESTS)], lambda part, index: 0.0), seconds)
    assert sorted(map(len, did))[0] == 1 and waited < 0.15
    shares = [sum(seconds[rank::RANKS]) for rank in range(RANKS)]
    assert idle_share(shares, shares) > 0.45


def test_the_longest_come_first_and_lengths_of_a_clip_together(together, monkeypatch):
    together(2)
    left, expected = [[0, 1, 2, 4], [1, 2]], {0: 5, 1: 2, 2: 3, 4: 5}
    long_first = [[(0, 2), (1, 2)], [(0, 0)], [(0, 4)], [(0, 1), (1, 1)]]
    assert units(left, lambda part, index: expected[index]) == long_first
    # A single rank takes them as they come.
    monkeypatch.setattr(ranks, "world_size", lambda: 1)
    in_order = [[(0, 0)], [(0, 1), (1, 1)], [(0, 2), (1, 2)], [(0, 4)]]
    assert units(left, lambda part, index: expected[index]) == in_order
    monkeypatch.setattr(ranks, "draw", lambda name: pytest.fail("there is no other rank"))
    assert list(dealt(in_order, pytest.fail, in_step=False)) == [*itertools.chain(*in_order)]


def test_ranks_in_step_do_all(together, monkeypatch):
    together(2)
    monkeypatch.setattr(ranks, "draw", lambda name: pytest.fail("ranks in step draw nothing"))
    queue = [[(0, 3)], [(0, 1)]]
    assert list(dealt(queue, pytest.fail, in_step=True)) == [(0, 3), (0, 1)]


def measure(folder, rank):
    """As a rank of a run: the values of each log, and what this one did."""
    done = []

    def work(part, index):
        done.append((part, index))
        return {"part": part, "square": index * index}

    stems = [folder / name for name in SETS]
    return resumed_in_turn(stems, [*SETS.values()], work, Stop(), expected=lambda part, index: index), done


SETS = {"short": 7, "long": 12}


def test_rows_of_two_ranks_are_those_of_one_after_a_kill_too(tmp_path):
    """Through a real store: two ranks do what a killed run of other ranks has left, each item once."""
    expected, _ = measure(tmp_path / "one", 0)
    assert expected[1][11] == {"part": 1, "square": 121}
    folder = tmp_path / "two"
    for name, kept in (("short-0", (6, 2)), ("long-1", (11, 0)), ("long-5", (4,))):
        folder.mkdir(exist_ok=True)
        lines = [json.dumps([str(n), {"part": int(name[0] == "l"), "square": n * n}]) for n in kept]
        (folder / f"{name}.jsonl").write_text("\n".join([*lines, '["7", {"par'][: len(lines) + (name == "long-5")]))
    answers = call_two_ranks(tmp_path, partial(measure, folder), context=FORKS)
    (first, did), (second, did_too) = answers[0], answers[1]
    assert first == second == expected and len(did) + len(did_too) == 14 == len({*did, *did_too})
    assert not {(0, 6), (1, 11)} & {*did, *did_too}
