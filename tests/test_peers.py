"""The comparison with peers' loops: what needs no clone runs at a tiny size, and differences end a run."""

import argparse
import importlib
import itertools
import math
import re
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))
from draftsmith.core.errors import UserError
from draftsmith.eval.policies import Chain
from peers import (
    assisted,
    clones,
    official_blocks,
    ours,
    pairs,
    specforge_dflash,
    speculators_eagle3,
    speculators_step,
    step_pairs,
    training_step,
)
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
    assert re.fullmatch(r"0\.\d\d, (met|missed)", greedy[2]) and greedy[6] == "1"
    # What the products alone take is less than the models' own work, of which they are a part.
    assert 0 < float(greedy[7]) < float(greedy[3].split()[0])
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


@pytest.fixture
def step_sides(tiny):
    torch.manual_seed(0)
    model = LlamaForCausalLM(ours.target_config(tiny, 7)).eval()
    mine = training_step.Ours(model)
    return mine, Twin(ARGUMENTS, mine, model)


def test_a_training_step_of_ours_trains_the_head_alone(step_sides):
    mine, _ = step_sides
    ids, supervised = sample = training_step.sample(3, 16, 32)
    assert ids.shape == supervised.shape == (1, 16) and supervised[0].tolist() == [False] * 4 + [True] * 12
    before = {name: value.clone() for name, value in mine.head.state_dict().items()}
    seconds = step_pairs.parts(mine, training_step.sample(3, 64, 32))
    expected = [pairs.TARGET, step_pairs.REST, step_pairs.BACKWARD, step_pairs.ADAMW]
    assert list(seconds) == expected and min(seconds.values()) > 0
    assert [n for n, p in mine.head.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert all(torch.equal(value, before[name]) for name, value in mine.head.state_dict().items()), "its rate is 0"
    assert 0 < step_pairs.products_share(mine, sample) < 1


def test_training_steps_that_differ_end_the_run(step_sides):
    mine, other = step_sides
    sample = training_step.sample(0, 16, 32)
    assert step_pairs.check_equal("x", mine, other, sample) == (0.0, 0.0)
    with torch.no_grad():
        next(iter(other.trained.values())).mul_(1.01)
    with pytest.raises(SystemExit, match="x: losses"):
        step_pairs.check_equal("x", mine, other, sample)


@pytest.mark.parametrize(("bar", "outcome"), [(1e-6, "missed"), (1e6, "met")])
def test_training_steps_give_a_row_each_and_say_where_missed_ones_go(tiny, monkeypatch, capsys, bar, outcome):
    monkeypatch.setattr(training_step, "Theirs", Twin)
    monkeypatch.setattr(training_step, "BAR", bar)
    training_step.training(argparse.Namespace(seed=0, pairs=1, sizes=[tiny], lengths=(8, 16)))
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    measured = [row for row in rows if row[0] in ("8, tiny", "16, tiny")]
    assert [row[2] for row in measured[:2]] == [outcome] * 2 and measured[0][4] == "0e+00, 0e+00"
    assert len(measured) == (4 if outcome == "missed" else 2), "a missed step is taken apart"


class StatesTwin(speculators_eagle3.Ours):
    """In the place of speculators' side: ours again, with the same weights."""

    def __init__(self, arguments: argparse.Namespace, mine: speculators_eagle3.Ours):
        super().__init__(mine.target.decoder.model)
        self.head.load_state_dict(mine.head.state_dict())


def test_steps_over_states_give_a_row_for_each_length_and_supervise_what_the_draft_can_say(tiny, monkeypatch, capsys):
    monkeypatch.setattr(speculators_eagle3, "Theirs", StatesTwin)
    monkeypatch.setattr(speculators_eagle3, "BAR", 1e6)
    speculators_eagle3.speculators_eagle3(argparse.Namespace(seed=0, pairs=1, sizes=[tiny], lengths=(32, 40)))
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == ["32, tiny", "40, tiny"] and {row[4] for row in rows[2:]} == {"0e+00, 0e+00"}
    torch.manual_seed(0)
    mine = speculators_eagle3.Ours(LlamaForCausalLM(ours.target_config(tiny, 7)).eval())
    batch, states, entropy = speculators_eagle3.Samples(mine, 40)(0)
    best = mine.target.scores(states.feature[0]).argmax(-1)
    inside = torch.isin(best, mine.head.draft_ids) & (torch.arange(40) >= 10)
    assert torch.equal(batch.loss_mask[0], inside) and 0 < inside.sum() < 30
    assert entropy < float(mine.loss(batch, states, entropy).detach()), "a cross-entropy is at least the entropy"


class BlockTwin(speculators_step.Ours):
    """In the place of speculators' side: ours again, with the same weights."""

    def __init__(self, arguments: argparse.Namespace, mine: speculators_step.Ours, losses: dict[str, float]):
        super().__init__(mine.target, mine.settings)
        self.head.load_state_dict(mine.head.state_dict())


def test_steps_of_blocks_give_a_row_for_each_kind_and_length(tiny, monkeypatch, capsys):
    monkeypatch.setattr(speculators_step, "Theirs", BlockTwin)
    monkeypatch.setattr(speculators_step, "BAR", 1e-6)
    speculators_step.speculators(argparse.Namespace(seed=0, pairs=1, sizes=[tiny], lengths=(32, 40)))
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    what = [f"{kind}, {length}, tiny" for kind in speculators_step.KINDS for length in (32, 40)]
    assert [row[0] for row in rows if row[0] in what] == what * 2, "each is missed, and taken apart"
    assert {row[4] for row in rows if row[0] in what and len(row) == 6} == {"0e+00, 0e+00"}


def test_steps_of_blocks_beside_specforge_have_a_row_for_each_length(tiny, monkeypatch, capsys):
    monkeypatch.setattr(specforge_dflash, "Theirs", BlockTwin)
    monkeypatch.setattr(speculators_step, "BAR", 1e6)
    specforge_dflash.specforge_dflash(argparse.Namespace(seed=0, pairs=1, sizes=[tiny], lengths=(32, 40)))
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == ["DFlash, 32, tiny", "DFlash, 40, tiny"]
    weights = speculators_step.KINDS["DFlash"][0].loss.weights(16)
    gammas = [1 / math.log(one / two) for one, two in itertools.pairwise(weights)]
    assert gammas == pytest.approx([specforge_dflash.GAMMA] * 14), "they decay as ours do"


def test_specforges_algorithms_are_found_one_by_one(tmp_path, monkeypatch):
    for name in ("", "common/", "other/"):
        file = tmp_path / "SpecForge" / "specforge" / "algorithms" / name / "__init__.py"
        file.parent.mkdir(parents=True)
        file.write_text("raise AssertionError('it registers every method')")
    (file.parents[2] / "__init__.py").touch()
    (file.parents[1] / "common" / "model.py").write_text("METHOD = 'DFlash'")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    clones.specforge(tmp_path, "common")
    assert importlib.import_module("specforge.algorithms.common.model").METHOD == "DFlash"
    with pytest.raises(AssertionError, match="registers every method"):
        importlib.import_module("specforge.algorithms.other")


@pytest.mark.parametrize("kind", speculators_step.KINDS)
def test_a_step_of_blocks_trains_all_weights_at_the_anchors_that_it_is_given(tiny, kind):
    torch.manual_seed(0)
    model = LlamaForCausalLM(ours.target_config(tiny, 7)).eval()
    target = speculators_step.CausalTarget(model, num_token_ids=32)
    mine = speculators_step.Ours(target, speculators_step.KINDS[kind][0])
    samples = speculators_step.Samples(target, model, mine.head.shape.block_size, 32)
    batch, states, anchors = samples(3)
    scores = target.scores(states.feature[0, 7:-1])
    assert torch.equal(scores.argmax(-1), batch.ids[0, 8:]), "the answer is the target's likeliest"
    assert len(anchors) == 4 and min(anchors) >= 8 and max(anchors) + mine.head.shape.block_size < 32
    loss = mine.loss(batch, states, anchors)
    loss.backward()
    assert [n for n, p in mine.trained.items() if p.grad is None or not p.grad.any()] == []
    alone = [mine.loss(batch, states, one[None]).detach() for one in anchors]
    assert torch.allclose(sum(alone) / 4, loss.detach(), rtol=1e-5), "a mean over the blocks"


def test_other_drafts_end_the_run(tiny):
    torch.manual_seed(0)
    model = LlamaForCausalLM(ours.target_config(tiny, 7)).eval()
    target = official_blocks.CausalTarget(model, num_token_ids=32)
    drafts = speculators_step.KINDS["DFlash"][0]
    drafter = drafts.drafter(drafts.build(target), target)

    asked = partial(ours.text, target, 8)
    mine = ours.side(target, drafter, ours.settings(Chain(15), 0.0), asked, {}).answer
    blocks: list[list[int]] = []

    def theirs(number: int, tokens: int) -> pairs.Answer:
        for block in ([1], *blocks):
            model.model(torch.tensor([block]))
        return SAME

    def noted(verify: Any) -> Any:
        def tree(session: Any, root: int, nodes: Any) -> Any:
            blocks.append([root, *nodes.tokens.tolist()])
            return verify(session, root, nodes)

        return tree

    with official_blocks.watched([(target, "verify")], noted):
        mine(100, 12)
    assert blocks and len(blocks[0]) > 2
    official_blocks.check_drafts("x", target, model, mine, theirs, ARGUMENTS)
    with pytest.raises(SystemExit, match="x: no cycle was seen: 0 of ours"):
        official_blocks.check_drafts("x", target, model, lambda number, tokens: SAME, theirs, ARGUMENTS)
    blocks[0][2] += 1 if blocks[0][2] < 31 else -1
    with pytest.raises(SystemExit, match="x: other drafts"):
        official_blocks.check_drafts("x", target, model, mine, theirs, ARGUMENTS)


def test_caches_are_cropped_to_lengths_and_by_counts_while_these_peers_run():
    cache = clones.DynamicCache()
    cache.update(torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2), 0)
    with clones.crops_to_lengths():
        for length, held in ((5, 5), (4, 4), (-1, 3), (9, 3)):
            cache.crop(length)
            assert cache.get_seq_length() == held
    cache.crop(0)  # of transformers' own loops: nothing is removed
    assert cache.get_seq_length() == 3
