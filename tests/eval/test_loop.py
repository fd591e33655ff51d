"""The loop never changes the target's output, and a copy of the target is accepted whole."""

from dataclasses import replace

import pytest
import torch
from decodings import greedy
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain, Draw, Static
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.targets.base import Taps, Verified
from tiny import EOS, SIZES, llava, proposal, reference, self_draft, target
from tiny import request as ask

TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0)]


@pytest.fixture(scope="module", params=SIZES.values(), ids=SIZES)
def sizes(request):
    return request.param


@pytest.fixture(scope="module")
def models(sizes):
    return llava(0, sizes=sizes), llava(1, width=16, layers=1, sizes=sizes)


@pytest.fixture(scope="module", params=[0, 1, 3])
def answers(request, models, sizes):
    """Requests with so many pictures, and what transformers' own decoding answers."""
    asked = [ask(seed, request.param, sizes=sizes) for seed in range(3)]
    return [(one, reference(models[0], one, 24)) for one in asked]


def test_plain_output_is_the_targets_own(models, answers):
    for asked, expected in answers:
        assert generate(target(models[0]), None, asked, greedy(Chain(1), 24, (EOS,))).tokens == expected


@pytest.mark.covering
@pytest.mark.parametrize("mode", ["M", "T"])
@pytest.mark.parametrize(
    "policy", [Chain(1), Chain(4), Chain(7), Static(TREE)], ids=["chain1", "chain4", "chain7", "static"]
)
def test_greedy_output_is_the_targets_own(models, answers, policy, mode):
    big, small = models
    for asked, expected in answers:
        assert generate(target(big), proposal(small, mode), asked, greedy(policy, 24, (EOS,))).tokens == expected


@pytest.mark.parametrize(("mode", "images"), [("M", 0), ("M", 1), ("M", 2), ("T", 0)])
@pytest.mark.parametrize("gamma", [5, 3])
def test_a_copy_of_the_target_is_accepted_whole(models, sizes, mode, images, gamma):
    big, _ = models
    drafted = accepted = 0
    for seed in range(4):
        result = generate(target(big), self_draft(big, mode), ask(seed, images, sizes=sizes), greedy(Chain(gamma)))
        for cycle in result.cycles:
            assert cycle.num_accepted == cycle.num_drafted
            drafted, accepted = drafted + cycle.num_drafted, accepted + cycle.num_accepted
    assert drafted == accepted > 40


def test_a_blind_copy_is_rejected_somewhere(models, sizes):
    """Guards the test above: if pictures did not matter, it would pass for a blind draft too."""
    big, _ = models
    cycles = [
        cycle
        for seed in range(4)
        for cycle in generate(target(big), self_draft(big, "T"), ask(seed, 1, sizes=sizes), greedy(Chain(5))).cycles
    ]
    assert any(cycle.num_accepted < cycle.num_drafted for cycle in cycles)
    assert any(cycle.num_accepted > 0 for cycle in cycles)


def test_end_token_inside_a_block_and_length_limits(models, sizes):
    big, _ = models
    asked = ask(1, 1, sizes=sizes)
    free = generate(target(big), None, asked, greedy(Chain(1), 24)).tokens
    for place in range(1, 12):
        eos = free[place]
        first = free.index(eos)
        result = generate(target(big), self_draft(big), asked, greedy(Chain(4), eos=(eos,)))
        assert result.tokens == free[: first + 1]
        assert result.stop == "eos"
    for limit in range(1, 12):
        result = generate(target(big), self_draft(big), asked, greedy(Chain(4), limit))
        assert result.tokens == free[:limit]
        assert result.stop == "length"
        assert sum(c.num_emitted for c in result.cycles) == limit - 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rule_gets_the_same_type_at_every_temperature(models, sizes, temperature):
    """A rule of somebody else's reads rows, of scores or of probabilities."""

    class Likeliest:
        name = "likeliest"

        def __call__(self, tree, p, uniforms):
            return Verified((), (), int(p.row(0).argmax()))

    big, _ = models
    decoding = replace(greedy(Chain(2)), rule=Likeliest(), warp=Warp(temperature))
    asked = ask(1, 1, sizes=sizes)
    result = generate(target(big), self_draft(big), asked, decoding, torch.Generator().manual_seed(0))
    assert temperature > 0 or result.tokens == generate(target(big), None, asked, greedy(Chain(2))).tokens


def test_tree_verification_equals_one_path_at_a_time(models, sizes):
    """Scores of a tree's nodes are those of plain passes along each path, also after a commit."""
    big, small = models
    asked = ask(3, 1, sizes=sizes)
    drafter, model = proposal(small), target(big)
    session, step = model.prefill(asked, Taps(feature=True), capacity=40)
    first = int(step.logits.argmax())
    drafter.start(asked, step, Warp(), capacity=40)
    drafter.begin(first)
    committed = [first]
    for _ in range(3):
        tree = Static(TREE).grow(drafter.root(), drafter.expand, Draw("top-k"), max_levels=3)
        step = model.verify(session, committed[-1], tree)
        for node in range(tree.num_nodes):
            path, walk = [], node
            while walk != -1:
                path.insert(0, walk)
                walk = tree.parents[walk]
            ids = [*asked.ids.tolist(), *committed, *(int(tree.tokens[n]) for n in path)]
            with torch.no_grad():
                expected = big(input_ids=torch.tensor([ids]), pixel_values=asked.pixels).logits[0, -1]
            finite = step.logits[node + 1].isfinite()
            assert torch.allclose(step.logits[node + 1][finite], expected[finite], atol=2e-5)
        verified = Greedy()(tree, step.logits)
        model.commit(session, verified.path)
        drafter.accept(replace(verified, tree=tree))
        committed += [*verified.tokens, verified.bonus]
