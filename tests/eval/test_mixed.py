"""An ensemble of drafters of different kinds (a draft LVLM with an EAGLE-3 head): outputs stay the target's.

Greedy outputs equal plain decoding; one weight of 1 is that member cycle for cycle; above temperature 0 whole cycles in
a row are enumerated, so that weights have adapted before they are used.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from decodings import greedy
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Static
from draftsmith.eval.rules import Greedy, Sampling, Verified
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters import AnyDrafter
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.drafters.mixed import MixedConfig, MixedProposal
from draftsmith.models.drafters.weights import FixedWeights, weights_of
from draftsmith.models.targets.base import TargetStep
from draftsmith.models.targets.llava.model import LlavaDecoder
from exact import TableDrafter
from heads_tiny import config_of
from pydantic import TypeAdapter, ValidationError
from test_combinations import EMITTED, TREES, big, drafter_of, target
from test_contract import not_vacuous
from test_ensemble_exact import ASKED, KINDS, SHAPES, check_enumerated, continuation, table
from test_exactness import CHAIN
from tiny import near, proposal, request

__all__ = ["big"]  # pytest looks fixtures up by their names here
WEIGHTS = {
    "fixed": {"kind": "fixed", "values": [0.3, 0.7]},
    "equal": {"kind": "fixed"},
    "grid": {"kind": "grid"},
    "inverse": {"kind": "inverse"},
}


def mixed(members, weights):
    config = MixedConfig(kind="ensemble", members=[str(n) for n in range(len(members))], weights=weights)
    assert isinstance(TypeAdapter(AnyDrafter).validate_python(config.model_dump()), MixedConfig)
    return config


def draft_of(big):
    """A draft LVLM whose vocabulary has rows more than the target's tokens."""
    return proposal(near(big.decoder.model))


@pytest.fixture(scope="module")
def pair(big):
    return [draft_of(big), drafter_of("eagle3, all taps", big)]


@pytest.fixture(scope="module")
def answered(big):
    asked = [request(3, images) for images in (2, 0, 1)]
    return [(one, generate(big, None, one, greedy(Chain(1), 9)).tokens) for one in asked]


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_greedy_output_is_plain_decoding(big, pair, answered, weights):
    drafter, cycles = mixed(pair, weights).drafter(pair, big), []
    assert drafter.taps.text_layers == pair[1].taps.text_layers and drafter.max_levels is None
    for tree, (asked, plain) in zip(TREES, itertools.cycle(answered)):
        result = generate(big, drafter, asked, greedy(TREES[tree](), 9))
        assert result.tokens == plain, tree
        cycles += result.cycles
    not_vacuous(cycles)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_member_alone_is_that_member(big, pair, answered, number, temperature):
    """Token for token and cycle for cycle, sampled ones too."""
    weights = {"kind": "fixed", "values": [float(number == n) for n in (0, 1)]}
    both, warp = mixed(pair, weights).drafter(pair, big), Warp(temperature, top_k=3 if temperature else 0)
    rule = Sampling() if temperature else Greedy()
    for (asked, _), policy in itertools.product(answered, (Chain(3), Dynamic(8, 2, 3), Static([(0,), (1,), (0, 0)]))):
        draw = Draw("sample" if temperature and policy.name != "dynamic" else "top-k")
        answers = []
        for drafter in (pair[number], both):
            decoding = Decoding(policy, rule, draw, warp, 9, ())
            result = generate(big, drafter, asked, decoding, torch.Generator().manual_seed(4))
            answers.append((result.tokens, [(c.num_drafted, c.num_accepted) for c in result.cycles]))
        assert answers[0] == answers[1]


def test_weights_start_afresh_with_each_request(big, pair, answered):
    """As an ensemble of modes: what one request taught says nothing of the next."""
    drafter, fresh = (mixed(pair, WEIGHTS["inverse"]).drafter(pair, big) for _ in range(2))
    generate(big, drafter, answered[0][0], greedy(Chain(3), 9))
    learned = drafter.weights.current
    for one in (drafter, fresh):
        step = big.prefill(answered[1][0], one.taps, capacity=20)[1]
        one.start(answered[1][0], step, Warp(), capacity=20)
    assert torch.equal(drafter.weights.current, fresh.weights.current)
    assert not torch.equal(learned, fresh.weights.current), "guards this test"


def test_weights_follow_the_better_member(big, answered):
    """A copy of the target beside one that is far away: the copy has nearly all the weight after a few cycles."""
    far = target(near(big.decoder.model)).decoder.model
    far.lm_head.weight.data = -far.lm_head.weight.data
    members = [
        IndependentProposal(LlavaDecoder(model, num_token_ids=EMITTED), "M", newline_id=5)
        for model in (far, big.decoder.model)
    ]
    for kind in ("grid", "inverse"):
        drafter = mixed(members, {"kind": kind}).drafter(members, big)
        seen = []
        for asked, plain in answered:
            assert generate(big, drafter, asked, greedy(Chain(3), 9)).tokens == plain
            seen.append(float(drafter.weights.current[1]))
        assert min(seen) > 0.85, kind


class Tables(MixedProposal):
    @property
    def committed(self):
        return self.members[0].committed


def started(kind, vocab, warp, of=Tables):
    drafter = of([TableDrafter(table(seed, vocab)) for seed in (1, 21)], weights_of(KINDS[kind], 2), vocab)
    drafter.start(ASKED, type("Prefill", (), {"logits": torch.zeros(1, vocab)}), warp, capacity=9)
    drafter.begin(0)
    return drafter


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_is_exact_by_enumeration(kind, shape):
    check_enumerated(started, kind, shape)


def test_the_enumeration_finds_weights_that_draw_and_verify_differently():
    """Drawn from one member and verified as the mixture."""
    warp, vocab = Warp(0.8), 2

    class Wrong(Tables):
        def root(self):
            super().root()
            return self.warp.apply_temperature(table(1, vocab)(self.committed)[None])[0]

        warp = property(lambda self: self._warp)

    class Lies(Sampling):
        def __call__(self, tree, p, uniforms):
            mixture = torch.full_like(tree.draft_probs, 0.5)
            return super().__call__(replace(tree, draft_probs=mixture), p, uniforms)

    drafter = started("fixed", vocab, warp, Wrong)
    assert continuation(drafter, CHAIN, Lies(), table(0, vocab), warp, vocab, 2, set()) > 0.01


def test_members_of_other_vocabularies_and_no_sense(big):
    """Rows beyond the target's vocabulary are cut, missing ones have no chance."""
    wide, narrow = torch.ones(2, 70) / 70, torch.ones(2, 40) / 40
    drafter = MixedProposal([draft_of(big)], weights_of(FixedWeights(kind="fixed"), 1), big.vocab_size)
    drafter.weights.start(torch.device("cpu"))
    for q in (wide, narrow):
        assert drafter._mixed([q]).shape == (2, big.vocab_size)
    for members, weights in ((["a"], {"kind": "fixed"}), (["a", "b"], {"kind": "fixed", "values": [1.0]})):
        with pytest.raises(ValidationError):
            MixedConfig(kind="ensemble", members=members, weights=weights)
    by_share = [
        config_of(kind="msd", visual_share=0.5, share_by=by).drafter(
            config_of(kind="msd").build(big), big
        ) for by in ("last", "text")
    ]  # fmt: skip
    with pytest.raises(ValueError, match="averaged over different queries"):
        MixedProposal(by_share, weights_of(FixedWeights(kind="fixed"), 2), EMITTED)


@pytest.mark.parametrize("policy", [Static([(0,), (1,), (0, 0), (1, 0)]), Dynamic(9, 2, 2)], ids=["static", "dynamic"])
def test_weights_learn_at_the_nodes_that_were_accepted(policy):
    """In a tree the second position of the path need not be the second that the members were asked about."""
    vocab, warp, seen = 4, Warp(0.8), []
    drafter = started("grid", vocab, warp)
    tree = policy.grow(drafter.root(), drafter.expand, Draw("top-k"), max_levels=9)
    second = tree.children[ROOT][1]
    assert tree.expansions[second] == 1, "the first child was expanded before it"
    path = (second, tree.children[second][0])
    tokens = tuple(int(tree.tokens[node]) for node in path)
    logits = torch.arange(3.0 * vocab).view(3, vocab)
    drafter.weights.observe = lambda p, q: seen.append((p, q))
    drafter.accept(Verified(path, tokens, 0, step=TargetStep(logits), tree=tree))
    ((p, q),) = seen
    prefixes = [(0,), (0, tokens[0]), (0, *tokens)][: len(p)]
    assert len(p) == 2 + (path[-1] in tree.children) and torch.equal(p, warp.apply_temperature(logits[: len(p)]))
    for member, own in zip(drafter.members, q, strict=True):
        torch.testing.assert_close(own, warp.apply_temperature(torch.stack([member.scores(x) for x in prefixes])))
