"""Clocks and spreads: what is compared ran in turn, and rounds stay aligned."""

import time

import pytest
from draftsmith.scripts import timing
from draftsmith.scripts.timing import in_turn, median, ratios, rounds, spread, timed


def test_the_order_changes_from_round_to_round():
    order = []
    actions = {name: lambda name=name: order.append(name) for name in "abc"}
    for number in range(3):
        assert set(in_turn(actions, number)) == set("abc")
    assert "".join(order) == "cbaabccba"


def test_rounds_do_not_count_the_warm_up_and_stay_aligned():
    calls = {"steady": 0, "slow first": 0}

    def steady():
        calls["steady"] += 1

    def slow_first():
        calls["slow first"] += 1
        time.sleep(0.2 if calls["slow first"] <= 2 else 0.004 * calls["slow first"])

    times = rounds({"steady": steady, "slow first": slow_first}, 3, warm_up=2)
    assert calls == {"steady": 5, "slow first": 5} and [len(t) for t in times.values()] == [3, 3]
    assert all(t >= 0.004 * call for t, call in zip(times["slow first"], (3, 4, 5), strict=True))
    assert sorted(times["slow first"])[1] < 0.15  # the median is not of the warm-up


def test_any_clock_counts():
    ticks = iter([10.0, 12.5])
    assert timed(lambda: None, lambda: next(ticks)) == 2.5


def test_wall_waits_for_the_device(monkeypatch):
    waited = []
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: waited.append(True))
    timed(lambda: None)
    assert len(waited) == 2  # what ran before does not count, what was started does


def test_spread_tells_median_and_quartiles():
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == "3.000 [2.000, 4.000]" and spread([0.25], 100) == "25.000"
    assert median([4.0, 1.0, 2.0, 3.0, 5.0], 10) == (30, 20, 40)


def test_ratios_are_of_neighbours():
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match=r"shorter|longer"):
        ratios([1.0], [1.0, 2.0])


def test_command_is_what_one_types(monkeypatch):
    monkeypatch.setattr(timing.sys, "argv", ["/somewhere/scripts/papers/measure_latency.py", "--quick"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert timing.command() == "OMP_NUM_THREADS=1 scripts/papers/measure_latency.py --quick"
