"""Drafting modes and ensembles: one batched forward gives what each mode gives alone, and nothing changes the output.

That they are exact above temperature 0 is in test_ensemble_exact.py.
"""

import copy
import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decodings import greedy
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Static
from draftsmith.eval.policies.product import best_nodes
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.ensemble import EnsembleConfig, EnsembleProposal, preset
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.drafters.modes import MODES, ImageSubstitutes
from draftsmith.models.drafters.weights import FixedWeights, GridWeights, InverseWeights, reached, weights_of
from draftsmith.models.targets.llava.section import LlavaTarget
from test_contract import not_vacuous
from tiny import IMAGE_ID, SIZES, llava, near, num_tokens, target
from tiny import request as ask

TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
TOP_K = Draw("top-k")
POLICIES = pytest.mark.parametrize("policy", [Chain(3), Static(TREE), Dynamic(8, 2, 3)], ids=lambda p: p.name)
STANDARD = [preset(name) for name in ("MT", "MT*", "MTCP", "MTCP*")]
FURTHER = [
    EnsembleConfig(name="MTCP-grid", members=tuple("MTCP"), weights=GridWeights(kind="grid", window=4)),
    EnsembleConfig(name="PC-tvd", members=tuple("PC"), weights=GridWeights(kind="grid", score="tvd", order="article")),
    EnsembleConfig(
        name="softmax", members=tuple("MTP"), weights=InverseWeights(kind="inverse", form="softmax", window=1)
    ),
    EnsembleConfig(
        name="best", members=tuple("CMT"), weights=InverseWeights(kind="inverse", error="tvd", temperature=0)
    ),
    EnsembleConfig(name="T-three", members=("T", "T-text", "T-raw"), weights=FixedWeights(kind="fixed")),
]


class Captions:
    """Says something else of each picture: `n` words, which depend on its pixels."""

    def captions(self, request):
        return [" ".join(["abc"[n % 3]] * (2 + n)) for n in (pixels.sum() > 0 for pixels in request.pixels)]


SUBSTITUTES = ImageSubstitutes(5, (8, 9, 10), (11, 12), lambda text: [20 + ord(c) % 7 for c in text], Captions())


def alone(model, mode):
    return IndependentProposal(target(model).decoder, mode, newline_id=5, substitutes=SUBSTITUTES)


def ensemble(model, config, kind=EnsembleProposal):
    weights = weights_of(config.weights, len(config.members))
    return kind(target(model).decoder, config.members, weights, newline_id=5, substitutes=SUBSTITUTES)


def members(*names, values=None):
    return EnsembleConfig(name="x", members=names, weights=FixedWeights(kind="fixed", values=values))


def cycles(model, drafter, policy, seeds=3, images=2, warp=None, draw=TOP_K):
    """Every cycle of a few requests."""
    rule = Sampling() if warp else Greedy()
    decoding = Decoding(policy, rule, draw, warp or Warp(), 24, ())
    actual = []
    for seed in range(seeds):
        result = generate(model, drafter, ask(seed, images), decoding, torch.Generator().manual_seed(seed))
        actual.append((result.tokens, [(c.num_drafted, c.num_nodes, c.num_accepted) for c in result.cycles]))
    return actual


def test_the_captioners_time_is_a_part_of_its_own():
    """TABED's table 4; modes that ask no captioner have none of it."""

    class Slow(Captions):
        def captions(self, request):
            time.sleep(0.05)
            return super().captions(request)

    model, draft = target(llava(0)), target(near(llava(0))).decoder
    slow = replace(SUBSTITUTES, captioner=Slow())
    for mode, least in (("C", 0.05), ("T", 0.0)):
        drafter = IndependentProposal(draft, mode, newline_id=5, substitutes=slow)
        result = generate(model, drafter, ask(0, 1), greedy(Chain(2), 4))
        assert least <= result.captioning_s <= result.draft_prefill_s and (result.captioning_s > 0) == (mode == "C")
    both = EnsembleProposal(
        draft, ("M", "C"), weights_of(preset("MT").weights, 2), newline_id=5, substitutes=slow,
    )  # fmt: skip
    assert generate(model, both, ask(0, 1), greedy(Chain(2), 4)).captioning_s >= 0.05


# --- one batched forward against each mode alone ---


class Compared(EnsembleProposal):
    """Beside each distribution, the mixture of those of single drafts that are told the same."""

    def beside(self, singles):
        self.singles, self.compared = singles, 0

    def start(self, request, prefill, warp, *, capacity):
        super().start(request, prefill, warp, capacity=capacity)
        for single in self.singles:
            single.start(request, prefill, warp, capacity=capacity)

    def begin(self, first):
        super().begin(first)
        for single in self.singles:
            single.begin(first)

    def root(self):
        return self.compare(super().root(), [single.root() for single in self.singles])

    def expand(self, parents, tokens):
        return self.compare(super().expand(parents, tokens), [s.expand(parents, tokens) for s in self.singles])

    def compare(self, found, apart):
        expected = sum(w * q for w, q in zip(self.weights.current, apart, strict=True))
        assert torch.allclose(found, expected, atol=1e-5)
        self.compared += 1
        return found

    def accept(self, verified):
        super().accept(verified)
        for single in self.singles:
            single.accept(verified)


@pytest.mark.covering
@POLICIES
@pytest.mark.parametrize("config", [STANDARD[1], STANDARD[3], FURTHER[-1]], ids=lambda c: c.name)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_batched_rows_are_the_modes_run_one_by_one(config, policy, sizes):
    big = llava(0, sizes=sizes)
    small, asked = near(big), [ask(images, images, sizes=sizes) for images in (1, 3)]
    drafter = ensemble(small, config, Compared)
    drafter.beside([alone(small, mode) for mode in config.members])
    for one in asked:
        not_vacuous(generate(target(big), drafter, one, greedy(policy)).cycles)
    # Guard: the rows are padded to different lengths, and they do not all say the same.
    lengths = [len(view.request.ids) for view in drafter.views(asked[1])]
    assert len(set(lengths)) > 1
    assert drafter.compared > 20


@pytest.mark.covering
@POLICIES
@pytest.mark.parametrize("mode", MODES)
def test_one_member_is_the_mode_itself(big, near, mode, policy):
    """To the last bit."""
    for images in (0, 1, 2):
        asked = ask(images, images)
        plain, single = alone(near, mode), ensemble(near, preset(mode))
        for drafter in (plain, single):
            drafter.start(asked, None, Warp(), capacity=20)
            drafter.begin(7)
        grown = [policy.grow(d.root(), d.expand, TOP_K, max_levels=3) for d in (plain, single)]
        assert torch.equal(grown[0].tokens, grown[1].tokens)
        assert torch.equal(plain.root(), single.root())
    expected = cycles(target(big), alone(near, mode), policy, seeds=1)
    for weights in (FixedWeights(kind="fixed"), GridWeights(kind="grid")):
        config = EnsembleConfig(name="x", members=(mode,), weights=weights)
        assert cycles(target(big), ensemble(near, config), policy, seeds=1) == expected


def test_pictures_are_looked_at_once(big, near):
    """M and P share the tower's pass; modes without pixels need none."""
    looked = []
    hook = near.model.vision_tower.register_forward_hook(lambda *_: looked.append(1))
    for config, passes in ((preset("MTCP*"), 1), (preset("MT"), 1), (preset("TC"), 0)):
        looked.clear()
        ensemble(near, config).start(ask(0, 2), None, Warp(), capacity=4)
        assert len(looked) == passes
    hook.remove()


# --- greedy identity ---


@pytest.fixture(scope="module", params=SIZES.values(), ids=SIZES)
def answers(request):
    """Target and draft; requests and what the target alone answers."""
    big = llava(0, sizes=request.param)
    asked = [ask(seed, images, sizes=request.param) for seed, images in ((0, 1), (1, 2), (2, 0))]
    return big, near(big), [(one, generate(target(big), None, one, greedy(Chain(5))).tokens) for one in asked]


@pytest.mark.covering
@POLICIES
@pytest.mark.parametrize("config", [*map(preset, MODES), *STANDARD, *FURTHER], ids=lambda c: c.name)
def test_greedy_output_is_plain_decoding(answers, config, policy):
    big, small, answers = answers
    drafter, actual = ensemble(small, config), []
    for asked, expected in answers:
        result = generate(target(big), drafter, asked, greedy(policy))
        assert result.tokens == expected
        actual += result.cycles
    not_vacuous(actual)


# --- self-draft ---


class SeesAs(LlavaTarget):
    """A target that is shown what a mode is shown."""

    def __init__(self, model, mode):
        super().__init__(model, num_token_ids=num_tokens(model), image_token_id=IMAGE_ID)
        self.mode, embed = mode, self.decoder.embed
        self.decoder.embed = lambda *given, **more: embed(*given, **(more | {"pool": 2 if mode == "P" else 1}))

    def prefill(self, request, taps, *, capacity):
        return super().prefill(SUBSTITUTES.view(request, self.mode).request, taps, capacity=capacity)


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_of_the_target_is_accepted_whole(big, mode):
    """In each mode of a target that sees what the mode sees; as an ensemble of one and of two; among others."""
    other = "T" if mode == "M" else "M"
    for drafter in (
        alone(copy.deepcopy(big), mode),
        ensemble(copy.deepcopy(big), members(mode)),
        ensemble(copy.deepcopy(big), members(mode, mode)),
        ensemble(copy.deepcopy(big), members(other, mode, values=(0, 1))),
        ensemble(copy.deepcopy(big), EnsembleConfig(name="x", members=(mode, mode), weights=GridWeights(kind="grid"))),
    ):
        result = cycles(SeesAs(big, mode), drafter, Chain(4), seeds=1)
        assert all(drafted == accepted for _, each in result for drafted, _, accepted in each)
        assert sum(accepted for _, each in result for _, _, accepted in each) > 15
    # Guard: what a mode sees decides what it proposes.
    rejected = cycles(SeesAs(big, mode), alone(copy.deepcopy(big), other), Chain(4), seeds=2)
    assert any(drafted > accepted for _, each in rejected for drafted, _, accepted in each)


# --- which positions the weights are told of ---


class Told:
    """A rule that remembers how many positions it was told of, and whether p and q are those of the same places."""

    adaptive = True
    current = torch.tensor([0.5, 0.5])

    def __init__(self):
        self.counts = []

    def start(self, device):
        return None

    def observe(self, p, q):
        assert p.shape == q.shape[1:] and len(q) == 2
        self.seen = p, q
        self.counts.append(len(p))


@pytest.mark.parametrize("warp", [Warp(), Warp(0.7)], ids=["greedy", "sampling"])
@POLICIES
def test_accepted_positions_and_the_first_rejected_one(big, near, policy, warp):
    """Never the bonus position, never what stands after a rejection, nothing where nothing was drafted."""
    told = Told()
    drafter = EnsembleProposal(target(near).decoder, ("M", "M"), told, newline_id=5)
    decoding = Decoding(policy, Greedy() if warp.greedy else Sampling(), TOP_K, warp, 24, ())
    uniforms = [torch.Generator().manual_seed(seed) for seed in range(12)]
    result = [c for own in uniforms for c in generate(target(big), drafter, ask(1, 1), decoding, own).cycles]
    drafted = [c for c in result if c.num_drafted]
    assert len(told.counts) == len(drafted)
    for count, cycle in zip(told.counts, drafted, strict=True):
        # Below a dynamic tree's shallow leaves nothing was drafted, either.
        assert count == min(cycle.num_accepted + 1, cycle.num_drafted) or (
            policy.name == "dynamic" and count == cycle.num_accepted
        )
    assert any(c.num_accepted == c.num_drafted for c in drafted), "some cycles end with a bonus token"
    assert any(c.num_accepted < c.num_drafted for c in drafted)


@pytest.mark.parametrize("ranks", list(itertools.product([0, 1], repeat=3)))
def test_a_node_of_a_product_tree_counts_by_the_distribution_of_its_level(ranks):
    """Beside the likeliest chain nothing was expanded; the children there come from the chain's rows all the same."""
    tree = best_nodes(np.array([[1, 2], [3, 4], [5, 6]]), np.full((3, 2), 0.4), 14, frozenset())
    path, node = [], ROOT
    for level, rank in enumerate(ranks):
        (node,) = [child for child in tree.children[node] if tree.tokens[child] == 1 + 2 * level + rank]
        path.append(node)
    assert reached(SimpleNamespace(tree=tree, path=path)) == [0, 1, 2]
    assert reached(SimpleNamespace(tree=tree, path=path[:1])) == [0, 1]


def test_adaptive_weights_start_afresh_with_each_request(big, near):
    """What a drafter has learned from one request says nothing of the next: rows must not depend on their order."""
    drafter, first, second = ensemble(near, preset("MT*")), ask(1, 1), ask(2, 2)
    alone = generate(target(big), ensemble(near, preset("MT*")), second, greedy(Chain(4))).cycles
    generate(target(big), drafter, first, greedy(Chain(4)))
    learned = drafter.weights.current
    behind = generate(target(big), drafter, second, greedy(Chain(4))).cycles
    assert [(c.num_drafted, c.num_accepted) for c in behind] == [(c.num_drafted, c.num_accepted) for c in alone]
    drafter.start(second, None, Warp(), capacity=20)
    assert not torch.equal(drafter.weights.current, learned), "guards this test"
    fresh = ensemble(near, preset("MT*"))
    fresh.start(second, None, Warp(), capacity=20)
    assert torch.equal(drafter.weights.current, fresh.weights.current)


def test_a_copy_tells_its_own_distributions(big):
    """p and q stand for the same positions, and neither is cut: of a copy of the target they are the same."""
    for policy in (Chain(4), Static(TREE), Dynamic(8, 2, 3)):
        told = Told()
        drafter = EnsembleProposal(target(copy.deepcopy(big)).decoder, ("M", "M"), told, newline_id=5)
        decoding = Decoding(policy, Sampling(), TOP_K, Warp(0.7, top_k=3), 12, ())
        observe, close = told.observe, []

        def compare(p, q, observe=observe, close=close):
            observe(p, q)
            close.append(torch.allclose(q, p.expand_as(q), atol=1e-5))

        told.observe = compare
        generate(target(big), drafter, ask(1, 1), decoding, torch.Generator().manual_seed(0))
        assert len(close) > 1 and all(close)
