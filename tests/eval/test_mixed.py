"""An ensemble of drafters of different kinds (a draft LVLM with an EAGLE-3 head): outputs stay the target's.

Greedy outputs equal plain decoding; one weight of 1 is that member cycle for cycle; above temperature 0 whole cycles in
a row are enumerated, so that weights have adapted before they are used.
"""

import itertools

import pytest
import torch
from draftsmith.core.batch import Request
from draftsmith.core.states import Taps
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Static
from draftsmith.eval.rules import Sampling, Verified
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters import AnyDrafter
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.drafters.mixed import MixedConfig, MixedProposal
from draftsmith.models.drafters.weights import FixedWeights
from draftsmith.models.targets.base import TargetStep
from draftsmith.models.targets.llava.decoder import LlavaDecoder
from heads_tiny import config_of
from pydantic import TypeAdapter, ValidationError
from test_combinations import EMITTED, TREES, big, drafter_of, target
from test_contract import greedy
from test_ensemble_exact import KINDS, SHAPES, continuation, table
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
    assert any(c.num_accepted for c in cycles) and any(c.num_accepted < c.num_drafted for c in cycles)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_member_alone_is_that_member(big, pair, answered, number, temperature):
    """Token for token and cycle for cycle, sampled ones too."""
    weights = {"kind": "fixed", "values": [float(number == n) for n in (0, 1)]}
    both, warp = mixed(pair, weights).drafter(pair, big), Warp(temperature, top_k=3 if temperature else 0)
    rule = Sampling() if temperature else greedy(Chain(1), 1).rule
    for (asked, _), policy in itertools.product(answered, (Chain(3), Dynamic(8, 2, 3), Static([(0,), (1,), (0, 0)]))):
        decoding = Decoding(
            policy, rule, Draw("sample" if temperature and policy.name != "dynamic" else "top-k"), warp, 9, ()
        )
        one, other = (
            generate(big, drafter, asked, decoding, torch.Generator().manual_seed(4))
            for drafter in (pair[number], both)
        )
        assert one.tokens == other.tokens
        assert [(c.num_drafted, c.num_accepted) for c in one.cycles] == [
            (c.num_drafted, c.num_accepted) for c in other.cycles
        ]


def test_weights_start_afresh_with_each_request(big, pair, answered):
    """As an ensemble of modes: what one request taught says nothing of the next."""
    drafter, fresh = (mixed(pair, WEIGHTS["inverse"]).drafter(pair, big) for _ in range(2))
    generate(big, drafter, answered[0][0], greedy(Chain(3), 9))
    learned = drafter.weights.current()
    for one in (drafter, fresh):
        step = big.prefill(answered[1][0], one.taps, capacity=20)[1]
        one.start(answered[1][0], step, Warp(), capacity=20)
    assert torch.equal(drafter.weights.current(), fresh.weights.current())
    assert not torch.equal(learned, fresh.weights.current()), "guards this test"


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
            seen.append(float(drafter.weights.current()[1]))
        assert min(seen) > 0.85, kind


class Table:
    """A drafter of scores that depend on the last two tokens; whatever is shown to it is checked to be consistent."""

    taps, max_levels = Taps(), None

    def __init__(self, scores):
        self.scores = scores

    def start(self, request, prefill, warp, *, capacity):
        self.warp = warp

    def begin(self, first):
        self.committed = (first,)

    def root(self):
        self.paths = []
        return self.warp.apply_temperature(self.scores(self.committed)[None])[0]

    def expand(self, parents, tokens):
        above = [self.paths[p] if p != ROOT else self.committed for p in parents]
        new = [(*a, t) for a, t in zip(above, tokens.tolist(), strict=True)]
        self.paths += new
        return self.warp.apply_temperature(torch.stack([self.scores(path) for path in new]))

    def accept(self, verified):
        self.committed += (*verified.tokens, verified.bonus)


class Tables(MixedProposal):
    @property
    def committed(self):
        return self.members[0].committed


def started(kind, vocab, warp):
    members = [Table(table(seed, vocab)) for seed in (1, 21)]
    drafter = Tables(members, KINDS[kind].build(2), vocab)
    asked = Request(torch.tensor([1]), torch.zeros(1, dtype=torch.int8), None)
    prefill = type("Prefill", (), {"logits": torch.zeros(1, vocab)})
    drafter.start(asked, prefill, warp, capacity=9)
    drafter.begin(0)
    return drafter


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_is_exact_by_enumeration(kind, shape):
    """As TABED's ensembles of modes: sampled chains and trees, trees of likeliest tokens; top-p cuts p and q."""
    (shape, vocab), warp, seen = SHAPES[shape], Warp(0.8, top_p=0.9), set()
    off = continuation(started(kind, vocab, warp), shape, Sampling(), table(0, vocab), warp, vocab, 3, seen)
    assert off < 1e-6
    assert kind == "fixed" or len(seen) > 2, "weights have adapted, and not always alike"


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
            from dataclasses import replace

            mixture = torch.full_like(tree.draft_probs, 0.5)
            return super().__call__(replace(tree, draft_probs=mixture), p, uniforms)

    members = [Table(table(seed, vocab)) for seed in (1, 21)]
    drafter = Wrong(members, FixedWeights(kind="fixed").build(2), vocab)
    drafter.start(None, type("Prefill", (), {"logits": torch.zeros(1, vocab)}), warp, capacity=9)
    drafter.begin(0)
    off = continuation(drafter, CHAIN, Lies(), table(0, vocab), warp, vocab, 2, set())
    assert off > 0.01


def test_members_of_other_vocabularies_and_no_sense(big):
    """Rows beyond the target's vocabulary are cut, missing ones have no chance."""
    wide, narrow = torch.ones(2, 70) / 70, torch.ones(2, 40) / 40
    drafter = MixedProposal([draft_of(big)], FixedWeights(kind="fixed").build(1), big.vocab_size)
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
        MixedProposal(by_share, FixedWeights(kind="fixed").build(2), EMITTED)


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
    drafter.accept(Verified(path, tokens, 0, None, step=TargetStep(logits), tree=tree))
    ((p, q),) = seen
    prefixes = [(0,), (0, tokens[0]), (0, *tokens)][: len(p)]
    assert len(p) == 2 + (path[-1] in tree.children) and torch.equal(p, warp.apply_temperature(logits[: len(p)]))
    for member, own in zip(drafter.members, q, strict=True):
        torch.testing.assert_close(own, warp.apply_temperature(torch.stack([member.scores(x) for x in prefixes])))
