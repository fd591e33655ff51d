"""The comparison with peers' loops: what needs no clone runs at a tiny size, and differences end a run."""

import argparse
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))
from draftsmith.core.errors import UserError
from peers import assisted, clones, ours, pairs, training_step
from transformers import LlamaForCausalLM

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 32}
ARGUMENTS = argparse.Namespace(seed=0, pairs=1, cycles=2, checked=1, tokens=12)


@pytest.fixture
def tiny(monkeypatch):
    """A size of its own beside the measured ones."""
    monkeypatch.setitem(ours.SIZES, "tiny", TINY)
    return "tiny"


def test_assisted_generation_gives_the_same_tokens_and_a_row_each(tiny, capsys):
    pairs.head()
    profiles = assisted.assisted(tiny, ARGUMENTS)
    pairs.profiles([replace(profile, met=False) for profile in profiles[:1]])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[0].split(", ", 1)[1] for row in rows[2:4]] == [f"tiny, T {t}, after 1 tokens" for t in (0, 1)]
    greedy, sampled = rows[2:4]
    assert int(greedy[5]) >= 1 and sampled[5] == ""  # compared cycles: sampled answers cannot be
    assert greedy[2] in ("met", "missed") and greedy[6] == "1"
    for profile in profiles:
        assert set(profile.shares) == {*pairs.PARTS, pairs.REST} and all(profile.shares.values())
        assert sum(profile.shares.values()) == pytest.approx(1.0, abs=0.2)  # medians of each part
    assert len(rows) == 7 and len(rows[-1]) == 1 + len(pairs.PARTS) + 1


def sides(mine: pairs.Answer, other: pairs.Answer) -> tuple[pairs.Side, pairs.Side]:
    return tuple(pairs.Side([], lambda number, tokens, answer=answer: answer) for answer in (mine, other))


SAME = pairs.Answer([5, 6, 7, 8, 9, 10], [1, 2, 0])


def test_equal_answers_count_their_cycles():
    cycles, taus = pairs.check_equal("x", *sides(SAME, SAME), ARGUMENTS, equal=True)
    assert cycles == 3 and taus == (2.0, 2.0)


@pytest.mark.parametrize(
    "other", [replace(SAME, tokens=[5, 6, 7, 8, 9, 11]), replace(SAME, accepted=[1, 1, 1])], ids=["token", "length"]
)
def test_a_difference_ends_the_run(other):
    with pytest.raises(SystemExit, match=r"other (tokens|accepted lengths)"):
        pairs.check_equal("x", *sides(SAME, other), ARGUMENTS, equal=True)
    pairs.check_equal("x", *sides(SAME, other), ARGUMENTS, equal=False)


def test_cycles_are_compared_where_they_begin_at_the_same_token():
    """transformers' first cycle stands one token before ours."""
    early = pairs.Answer(SAME.tokens, [0, 1, 2], before=0)
    assert pairs.check_equal("x", *sides(SAME, early), ARGUMENTS, equal=True)[0] == 2


def test_only_whole_cycles_behind_the_prompt_are_timed(monkeypatch):
    """The clock is read when the second pass begins and when the one after the last cycle does."""
    now = iter([10.0, 13.0])
    monkeypatch.setattr(pairs.time, "thread_time", lambda: next(now))
    monkeypatch.setattr(pairs, "Meter", lambda: types.SimpleNamespace(restart=lambda: None, shares=dict))
    model: Any = types.SimpleNamespace(calls=[], forward=lambda: model.calls.append(1))

    def answer(number: int, tokens: int) -> pairs.Answer:
        for _ in range(tokens):
            model.forward()
        return SAME

    assert pairs.cycle_seconds(pairs.Side([(model, "forward")], answer), 0, cycles=2) == 1.5
    assert len(model.calls) == 3  # the prompt's and two cycles'
    with pytest.raises(SystemExit, match="an answer ended"):
        pairs.cycle_seconds(pairs.Side([], answer), 0, cycles=2)


def test_a_missing_clone_is_named(tmp_path):
    with pytest.raises(UserError, match="EAGLE is no folder"):
        clones.clone(tmp_path, clones.EAGLE)


def test_requests_follow_from_their_number():
    assert torch.equal(ours.prompt(3, 9, 32), ours.prompt(3, 9, 32))
    assert not torch.equal(ours.prompt(3, 9, 32), ours.prompt(4, 9, 32))


class Twin(training_step.Ours):
    """In the place of EAGLE's side, whose clone these tests lack: ours again, with weights of the same draw."""

    def __init__(self, arguments: argparse.Namespace, mine: training_step.Ours, model: Any):
        super().__init__(model)
        self.head.load_state_dict(mine.head.state_dict())
        self.trained = dict(self.head.named_parameters())


@pytest.fixture
def step_sides(tiny):
    torch.manual_seed(0)
    model = LlamaForCausalLM(ours.target_config(tiny, 7)).eval()
    mine = training_step.Ours(model)
    return mine, Twin(ARGUMENTS, mine, model)


def test_a_training_step_of_ours_trains_the_head_alone(step_sides):
    mine, _ = step_sides
    ids, supervised = training_step.sample(3, 16, 32)
    assert ids.shape == supervised.shape == (1, 16) and supervised[0].tolist() == [False] * 4 + [True] * 12
    before = {name: value.clone() for name, value in mine.head.state_dict().items()}
    seconds = training_step.parts(mine, 3, 64, 32)
    assert list(seconds) == list(training_step.PARTS) and min(seconds.values()) > 0
    assert [n for n, p in mine.head.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert all(torch.equal(value, before[name]) for name, value in mine.head.state_dict().items()), "its rate is 0"
    assert 0 < training_step.products_share(mine, 16, 32) < 1


def test_training_steps_that_differ_end_the_run(step_sides):
    mine, other = step_sides
    assert training_step.check_equal(mine, other, 16, 32) == (0.0, 0.0)
    with torch.no_grad():
        next(iter(other.trained.values())).mul_(1.01)
    with pytest.raises(SystemExit, match="training at 16 tokens: losses"):
        training_step.check_equal(mine, other, 16, 32)


@pytest.mark.parametrize(("bar", "outcome"), [(1e-6, "missed"), (1e6, "met")])
def test_training_steps_give_a_row_each_and_say_where_missed_ones_go(tiny, monkeypatch, capsys, bar, outcome):
    monkeypatch.setattr(training_step, "Theirs", Twin)
    monkeypatch.setattr(training_step, "BAR", bar)
    training_step.training(argparse.Namespace(seed=0, pairs=1, sizes=[tiny], lengths=(8, 16)))
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    measured = [row for row in rows if row[0] in ("8, tiny", "16, tiny")]
    assert [row[2] for row in measured[:2]] == [outcome] * 2 and measured[0][4] == "0e+00, 0e+00"
    assert len(measured) == (4 if outcome == "missed" else 2), "a missed step is taken apart"
