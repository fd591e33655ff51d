"""One fake for each leak that the decoding contract names; none of them may change the target's output."""

import copy

import pytest
import torch
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Static
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.decoding.rows import first_row, guide, mix
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from fakes import (
    CannotExpand,
    GuidedTarget,
    ReadsAttention,
    ReadsFeatures,
    ReadsHistory,
    RowsProposal,
    no_picture,
    picture,
    states,
)
from tiny import IMAGE_ID, PATCHES, TOKENS, llava, proposal, request, self_draft, target

TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
POLICIES = pytest.mark.parametrize("policy", [Chain(3), Static(TREE)], ids=["chain", "static"])


def greedy(policy, max_new_tokens=24) -> Decoding:
    return Decoding(policy, Greedy(), Draw("top-k"), Warp(), max_new_tokens, ())


def decoder(model) -> CachedDecoder:
    return CachedDecoder(copy.deepcopy(model), num_token_ids=TOKENS, never=(IMAGE_ID,))


@pytest.fixture(scope="module")
def big():
    return llava(0)


@pytest.fixture(scope="module")
def near(big):
    """A draft that agrees with the target now and then."""
    model = copy.deepcopy(big)
    generator = torch.Generator().manual_seed(1)
    for weight in model.lm_head.parameters():
        weight.data += 0.12 * torch.randn(weight.shape, generator=generator)
    return model


def compare(make_target, drafter, policy, seeds=3, images=1):
    """Outputs with the drafter are plain decoding's; returns all cycles."""
    cycles = []
    for seed in range(seeds):
        asked = request(seed, images)
        plain = generate(make_target(), None, asked, greedy(policy)).tokens
        drafted = generate(make_target(), drafter, asked, greedy(policy))
        assert drafted.tokens == plain
        cycles += drafted.cycles
    return cycles


def not_vacuous(cycles):
    assert any(c.num_accepted for c in cycles)
    assert any(c.num_accepted < c.num_drafted for c in cycles)


@POLICIES
def test_rows_with_a_reduction(big, near, policy):
    ensemble = RowsProposal(decoder(near), [picture, no_picture], mix(torch.tensor([0.5, 0.5]), 0.0))
    not_vacuous(compare(lambda: target(big), ensemble, policy, images=2))


def test_an_ensemble_of_one_copy_is_accepted_whole(big):
    for weights in ([1.0], [0.5, 0.5]):
        views = [picture] * len(weights)
        ensemble = RowsProposal(decoder(big), views, mix(torch.tensor(weights), 0.0))
        cycles = compare(lambda: target(big), ensemble, Chain(4))
        assert all(c.num_accepted == c.num_drafted for c in cycles)
        assert sum(c.num_accepted for c in cycles) > 30


@POLICIES
def test_a_guided_target_with_guided_and_plain_drafts(big, near, policy):
    """Guidance never leaves target and drafter: the loop sees one distribution."""
    make = lambda: GuidedTarget(decoder(big), guide(2.0))  # noqa: E731
    not_vacuous(compare(make, proposal(near), policy))
    copied = RowsProposal(decoder(big), [picture, no_picture], guide(2.0))
    cycles = compare(make, copied, Chain(3))
    assert all(c.num_accepted == c.num_drafted for c in cycles)
    # Not the unguided target in disguise.
    asked = request(0, 1)
    unguided = generate(target(big), None, asked, greedy(policy)).tokens
    assert generate(make(), None, asked, greedy(policy)).tokens != unguided


def test_reductions_nest():
    scores = torch.randn(4, 2, 7)
    weights = torch.tensor([0.3, 0.7])
    nested = guide(1.5, mix(weights, 1.0))(scores)
    guided = scores[2:] + 1.5 * (scores[:2] - scores[2:])
    expected = (0.3 * guided[0].softmax(-1) + 0.7 * guided[1].softmax(-1)).log()
    assert torch.allclose(nested, expected, atol=1e-6)
    assert torch.equal(guide(1.0)(scores[:2]), first_row(scores)) or torch.allclose(guide(1.0)(scores[:2]), scores[0])


@POLICIES
def test_features_of_accepted_nodes(big, near, policy):
    for seed in range(2):
        asked = request(seed, 1)
        drafter = ReadsFeatures(near)
        result = generate(target(big), drafter, asked, greedy(policy))
        assert result.tokens == generate(target(big), None, asked, greedy(policy)).tokens
        not_vacuous(result.cycles)
        # The prompt and every committed token but the newest: each cycle hands over the root and the path.
        feature, middle = torch.cat(drafter.features, 1)[0], torch.cat(drafter.middle, 1)[0]
        expected_feature, expected_middle = states(big, asked, result.tokens)
        count = len(asked.ids) + len(result.tokens) - 1
        assert torch.allclose(feature[:count], expected_feature[:count], atol=3e-5)
        assert torch.allclose(middle[:count], expected_middle[:count], atol=3e-5)


def test_only_what_was_asked_for_is_served(big):
    _, step = target(big).prefill(request(0, 1), ReadsAttention.taps, capacity=4)
    assert step.feature is None and step.layers == {}
    assert sorted(step.attention) == [0, 1]


def test_prefill_attention(big, near):
    drafter = ReadsAttention(near)
    not_vacuous(compare(lambda: target(big), drafter, Chain(3)))
    length = len(request(2, 1).ids)
    for weights in drafter.attention.values():
        assert weights.shape == (1, 2, length, length)
        assert torch.allclose(weights.sum(-1), torch.ones(1, 2, length), atol=1e-5)
        assert weights.triu(1).abs().max() == 0


@POLICIES
def test_a_drafter_that_cannot_expand(big, near, policy):
    cycles = compare(lambda: target(big), CannotExpand(near), policy)
    not_vacuous(cycles)
    assert max(c.num_drafted for c in cycles) == 2


def test_a_policy_that_reads_history(big, near):
    policy = ReadsHistory(6)
    not_vacuous(compare(lambda: target(big), proposal(near), policy))
    assert len(set(policy.lengths)) > 1


@pytest.mark.parametrize("policy", [Chain(3), Static(TREE)], ids=["chain", "static"])
def test_sampled_draws_keep_what_they_were_drawn_from(near, policy):
    """The tree holds the parents' whole distributions, in draw order."""
    asked, warp = request(0, 1), Warp(1.0, top_k=8)
    drafter = proposal(near)
    drafter.start(asked, None, warp, capacity=40)
    drafter.begin(7)
    asked_for = {ROOT: warp.truncate(drafter.root())}
    slots = []

    def expand(parents, tokens):
        q = warp.truncate(drafter.expand(parents, tokens))
        for row in q:
            asked_for[len(slots)] = row
            slots.append(row)
        return q

    draw = Draw("sample", torch.Generator().manual_seed(0))
    tree = policy.grow(asked_for[ROOT], expand, draw, max_levels=9)
    for node, parent in enumerate(tree.parents):
        row = tree.draft_probs[tree.parent_rows[node]]
        assert torch.equal(row, asked_for[ROOT if parent == ROOT else tree.slots[parent]])
        assert row[tree.tokens[node]] > 0
    for children in tree.children.values():
        tokens = [int(tree.tokens[c]) for c in children]
        assert len(set(tokens)) == len(tokens), "siblings are drawn without replacement"


def test_several_pictures_and_several_turns(big):
    """A copy is accepted whole on long prompts whose pictures stand in several turns."""
    generator = torch.Generator().manual_seed(4)
    asked = request(4, 3)
    turns = [request(seed, 1) for seed in range(3)]
    ids = torch.cat([t.ids[1:] for t in turns])
    joined = type(asked)(
        torch.cat([asked.ids, ids]),
        torch.cat([asked.modality, *(t.modality[1:] for t in turns)]),
        torch.cat([asked.pixels, *(torch.randn(1, 3, 16, 16, generator=generator) for _ in turns)]),
    )
    assert int((joined.ids == IMAGE_ID).sum()) == 6 * PATCHES
    result = generate(target(big), self_draft(big), joined, greedy(Chain(4)))
    assert result.tokens == generate(target(big), None, joined, greedy(Chain(4))).tokens
    assert all(c.num_accepted == c.num_drafted for c in result.cycles)
