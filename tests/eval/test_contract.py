"""One fake for each leak that the decoding contract names; none of them may change the target's output."""

import copy
from dataclasses import replace

import pytest
import torch
from decodings import greedy
from draftsmith.core.batch import TEXT
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Static
from draftsmith.eval.rules import Sampling
from draftsmith.models.attention import GROUPED
from draftsmith.models.decoding.rows import guide
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.targets.llava.model import LlavaDecoder
from fakes import (
    CannotExpand,
    ReadsAttention,
    ReadsFeatures,
    ReadsHistory,
    states,
)
from tiny import EOS, IMAGE_ID, PATCHES, TOKENS, proposal, reference, request, self_draft, target

TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
POLICIES = pytest.mark.parametrize("policy", [Chain(3), Static(TREE)], ids=["chain", "static"])


def decoder(model) -> LlavaDecoder:
    return LlavaDecoder(copy.deepcopy(model), num_token_ids=TOKENS, never=(IMAGE_ID,))


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


def test_guidance_moves_away_from_the_row_without_a_condition():
    scores = torch.randn(2, 2, 7)
    assert torch.allclose(guide(scores, 1.5), scores[1] + 1.5 * (scores[0] - scores[1]), atol=1e-6)
    assert torch.allclose(guide(scores, 1.0), scores[0], atol=1e-6)


def test_guidance_keeps_out_what_neither_row_may_say():
    """Minus infinity less minus infinity is not a number, and `argmax` would return exactly that place."""
    scores = torch.randn(2, 3, 5)
    scores[:, :, 3] = float("-inf")
    guided = guide(scores, 3.0)
    assert guided[:, 3].isneginf().all()
    assert guided[:, [0, 1, 2, 4]].isfinite().all()


@POLICIES
def test_features_of_accepted_nodes(big, near, policy):
    for seed in range(2):
        asked = request(seed, 1)
        drafter = ReadsFeatures(near)
        result = generate(target(big), drafter, asked, greedy(policy))
        assert result.tokens == generate(target(big), None, asked, greedy(policy)).tokens
        not_vacuous(result.cycles)
        # The prompt and every committed token but the newest: each cycle hands over the root and the path.
        feature = torch.cat(drafter.features, 1)[0]
        expected_feature, expected_layers = states(big, asked, result.tokens)
        count = len(asked.ids) + len(result.tokens) - 1
        assert torch.allclose(feature[:count], expected_feature[:count], atol=3e-5)
        for layer in (0, 1, 2):
            actual = torch.cat([step[layer] for step in drafter.layers], 1)[0]
            assert torch.allclose(actual[:count], expected_layers[layer][:count], rtol=1e-4, atol=1e-4)
        # Not the same thing under several names: the state after the last layer is before the norm.
        assert not torch.allclose(expected_layers[2], expected_feature, atol=0.1)


def test_only_what_was_asked_for_is_served(big):
    _, step = target(big).prefill(request(0, 1), ReadsAttention.taps, capacity=4)
    assert step.feature is None and step.layers == {}
    assert sorted(step.attention) == [0, 1]


def test_prefill_attention(big, near):
    drafter = ReadsAttention(near)
    not_vacuous(compare(lambda: target(big), drafter, Chain(3)))
    asked = request(2, 1)  # the last one that was decoded
    length = len(asked.ids)
    eager = eagerly(big)
    with torch.no_grad():
        expected = eager(input_ids=asked.ids[None], pixel_values=asked.pixels, output_attentions=True).attentions
    last = int((asked.modality != TEXT).nonzero()[-1])
    queries = {
        "last": [length - 1], "suffix": range(last + 1, length),
        "text": (asked.modality == TEXT).nonzero().flatten().tolist(),
    }  # fmt: skip
    for name, places in queries.items():
        taps = replace(drafter.taps, attention_queries=name)
        for chunk in (None, 3):
            own = target(big)
            own.prefill_chunk = chunk
            for layer, weights in own.prefill(asked, taps, capacity=1)[1].attention.items():
                assert weights.shape == (1, 2, length) and weights.dtype == torch.float32
                assert torch.allclose(weights, expected[layer][:, :, list(places)].mean(2), atol=1e-5)
    assert all(torch.allclose(w, expected[n][:, :, -1], atol=1e-5) for n, w in drafter.attention.items())
    assert big.model.language_model.config._attn_implementation == GROUPED, "as it was before the prompt"


def test_the_attention_decides_what_is_proposed(big, near):
    """Guards the test above: another favourite, another draft."""
    asked, first = request(2, 1), []
    _, step = target(big).prefill(asked, ReadsAttention.taps, capacity=4)
    for favourite in asked.ids[asked.modality == TEXT].unique().tolist():
        drafter = ReadsAttention(near)
        drafter.start(asked, step, Warp(), capacity=8)
        drafter.favourite = favourite
        drafter.begin(7)
        first.append(int(drafter.root().argmax()))
    assert len(set(first)) > 2


def eagerly(model):
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    return model


@POLICIES
def test_a_model_that_computes_attention_eagerly(big, near, policy):
    """Eager attention adds its mask to the scores: a boolean one would let every position see every other."""
    eager, asked = eagerly(big), request(0, 1)
    usual = generate(target(big), None, asked, greedy(policy)).tokens
    assert generate(target(eager), None, asked, greedy(policy)).tokens == usual
    not_vacuous(compare(lambda: target(eager), proposal(near), policy))


@POLICIES
def test_a_drafter_that_cannot_expand(big, near, policy):
    cycles = compare(lambda: target(big), CannotExpand(near), policy)
    not_vacuous(cycles)
    assert max(c.num_drafted for c in cycles) == 2


def test_a_policy_that_reads_history(big, near):
    policy, limit = ReadsHistory(6), 24
    not_vacuous(compare(lambda: target(big), proposal(near), policy))
    # Each cycle drafts one more than stood in the cycle before, and each request starts afresh.
    assert len(policy.lengths) == 3
    for lengths, accepted in zip(policy.lengths, policy.accepted, strict=True):
        emitted = 1
        for cycle, length in enumerate(lengths):
            before = accepted[cycle - 1] if cycle else 0
            assert length == min(before + 1, limit - emitted - 1, policy.num_levels)
            emitted += accepted[cycle] + 1
    assert len({length for lengths in policy.lengths for length in lengths}) > 2


@pytest.mark.parametrize("policy", [Chain(3), Static(TREE)], ids=["chain", "static"])
def test_sampled_draws_keep_what_they_were_drawn_from(near, policy):
    """The tree holds the parents' whole distributions, in draw order."""
    asked, warp = request(0, 1), Warp(1.0, top_k=8)
    drafter = proposal(near)
    drafter.start(asked, None, warp, capacity=40)
    drafter.begin(7)
    asked_for = {ROOT: warp.truncate(drafter.root())}
    expansions = []

    def expand(parents, tokens):
        q = warp.truncate(drafter.expand(parents, tokens))
        for row in q:
            asked_for[len(expansions)] = row
            expansions.append(row)
        return q

    draw = Draw("sample", torch.Generator().manual_seed(0))
    tree = policy.grow(asked_for[ROOT], expand, draw, max_levels=9)
    for node, parent in enumerate(tree.parents):
        row = tree.draft_probs[tree.parent_rows[node]]
        assert torch.equal(row, asked_for[ROOT if parent == ROOT else tree.expansions[parent]])
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
    expected = reference(big, joined, 24)
    until_end = replace(greedy(Chain(4)), eos_ids=(EOS,))
    result = generate(target(big), self_draft(big), joined, until_end)
    assert result.tokens == expected
    assert all(c.num_accepted == c.num_drafted for c in result.cycles)
    # Guard: every picture counts, the last one too.
    other = replace(joined, pixels=torch.cat([joined.pixels[:-1], -joined.pixels[-1:]]))
    assert generate(target(big), None, other, until_end).tokens != expected


@POLICIES
def test_pictures_side_by_side_and_a_blind_draft(big, near, policy):
    """Mode T turns each of two adjacent runs into one newline; what it drafts never changes the output."""
    apart = request(1, 2)  # 1, 7, run, 7, run, words
    kept = torch.arange(len(apart.ids)) != 2 + PATCHES
    joined = replace(apart, ids=apart.ids[kept], modality=apart.modality[kept])
    blind = proposal(near, "T")
    seen = blind.views(joined)[0].request.ids.tolist()
    assert seen == [1, 7, blind.newline_id, blind.newline_id, *apart.ids[-6:].tolist()]
    result = generate(target(big), blind, joined, greedy(policy))
    assert result.tokens == generate(target(big), None, joined, greedy(policy)).tokens
    not_vacuous(result.cycles)


@POLICIES
def test_sampled_draws_repeat_with_the_request(big, near, policy):
    """One generator decides all of a request: reports must not depend on what ran before, or on which rank."""
    decoding = Decoding(policy, Sampling(), Draw("sample"), Warp(1.0), 24, ())
    results = []
    for elsewhere in (0, 1):
        torch.manual_seed(elsewhere)
        generator = torch.Generator().manual_seed(5)
        results.append(generate(target(big), proposal(near), request(0, 1), decoding, generator))
    assert [c.num_accepted for c in results[0].cycles] == [c.num_accepted for c in results[1].cycles]
    assert results[0].tokens == results[1].tokens
    not_vacuous(results[0].cycles)
    another = generate(target(big), proposal(near), request(0, 1), decoding, torch.Generator().manual_seed(6))
    assert another.tokens != results[0].tokens
