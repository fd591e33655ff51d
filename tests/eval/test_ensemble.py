"""Drafting modes and ensembles: one batched forward gives what each mode gives alone, and nothing changes the output.

Exactness above temperature 0 is enumerated over whole cycles, so that the weights have adapted before they are used.
"""

import copy
import itertools
import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.nouns import Request
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Static
from draftsmith.eval.rules import Greedy, Sampling, Verified
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.ensemble import EnsembleConfig, EnsembleProposal, preset
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.drafters.modes import MODES, StandIns
from draftsmith.models.drafters.weights import FixedWeights, GridWeights, InverseWeights
from draftsmith.models.targets.base import TargetStep
from draftsmith.models.targets.llava import LlavaTarget
from test_contract import greedy, not_vacuous
from test_exactness import CHAIN, FORK, NoResidual, chi_square, outcomes, trees
from tiny import IMAGE_ID, TOKENS, llava, near, request, target

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


STAND_INS = StandIns(5, (8, 9, 10), (11, 12), lambda text: [20 + ord(c) % 7 for c in text], Captions())


def decoder(model):
    return CachedDecoder(model, num_token_ids=TOKENS, never=(IMAGE_ID,))


def alone(model, mode):
    return IndependentProposal(decoder(model), mode, newline_id=5, stand_ins=STAND_INS)


def ensemble(model, config, **more):
    weights = config.weights.build(len(config.members))
    return EnsembleProposal(decoder(model), config.members, weights, newline_id=5, stand_ins=STAND_INS, **more)


def members(*names, values=None):
    return EnsembleConfig(name="x", members=names, weights=FixedWeights(kind="fixed", values=values))


@pytest.fixture(scope="module")
def big():
    return llava(0)


@pytest.fixture(scope="module", name="near")
def near_draft(big):
    return near(big)


def cycles(model, drafter, policy, seeds=3, images=2, warp=None, draw=TOP_K):
    """Every cycle of a few requests."""
    rule = Sampling() if warp else Greedy()
    decoding = Decoding(policy, rule, draw, warp or Warp(), 24, ())
    found = []
    for seed in range(seeds):
        result = generate(model, drafter, request(seed, images), decoding, torch.Generator().manual_seed(seed))
        found.append((result.tokens, [(c.num_drafted, c.num_nodes, c.num_accepted) for c in result.cycles]))
    return found


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
        expected = sum(w * q for w, q in zip(self.weights.current(), apart, strict=True))
        assert torch.allclose(found, expected, atol=1e-5)
        self.compared += 1
        return found

    def accept(self, verified):
        super().accept(verified)
        for single in self.singles:
            single.accept(verified)


@POLICIES
@pytest.mark.parametrize("config", [STANDARD[1], STANDARD[3], FURTHER[-1]], ids=lambda c: c.name)
def test_batched_rows_are_the_modes_run_one_by_one(big, near, config, policy):
    weights = config.weights.build(len(config.members))
    drafter = Compared(decoder(near), config.members, weights, newline_id=5, stand_ins=STAND_INS)
    drafter.beside([alone(near, mode) for mode in config.members])
    for images in (1, 3):
        not_vacuous(generate(target(big), drafter, request(images, images), greedy(policy)).cycles)
    # Guard: the rows are padded to different lengths, and they do not all say the same.
    lengths = [len(view.request.ids) for view in drafter.views(request(3, 3))]
    assert len(set(lengths)) > 1
    assert drafter.compared > 20


@POLICIES
@pytest.mark.parametrize("mode", MODES)
def test_one_member_is_the_mode_itself(big, near, mode, policy):
    """To the last bit."""
    for images in (0, 1, 2):
        asked = request(images, images)
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
        ensemble(near, config).start(request(0, 2), None, Warp(), capacity=4)
        assert len(looked) == passes
    hook.remove()


# --- greedy identity ---


@POLICIES
@pytest.mark.parametrize("config", [*map(preset, MODES), *STANDARD, *FURTHER], ids=lambda c: c.name)
def test_greedy_output_is_plain_decoding(big, near, config, policy):
    drafter, found = ensemble(near, config), []
    for seed, images in ((0, 1), (1, 2), (2, 0)):
        asked = request(seed, images)
        result = generate(target(big), drafter, asked, greedy(policy))
        assert result.tokens == generate(target(big), None, asked, greedy(policy)).tokens
        found += result.cycles
    not_vacuous(found)


# --- self-draft ---


class SeesAs(LlavaTarget):
    """A target that is shown what a mode is shown."""

    def __init__(self, model, mode):
        super().__init__(model, num_token_ids=TOKENS, image_token_id=IMAGE_ID)
        self.mode, embed = mode, self.decoder.embed
        self.decoder.embed = lambda *given, **more: embed(*given, **(more | {"pool": 2 if mode == "P" else 1}))

    def prefill(self, request, taps, *, capacity):
        return super().prefill(STAND_INS.view(request, self.mode).request, taps, capacity=capacity)


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
        found = cycles(SeesAs(big, mode), drafter, Chain(4), seeds=1)
        assert all(drafted == accepted for _, each in found for drafted, _, accepted in each)
        assert sum(accepted for _, each in found for _, _, accepted in each) > 15
    # Guard: what a mode sees decides what it proposes.
    rejected = cycles(SeesAs(big, mode), alone(copy.deepcopy(big), other), Chain(4), seeds=2)
    assert any(drafted > accepted for _, each in rejected for drafted, _, accepted in each)


# --- exactness above temperature 0, by enumeration ---


def table(seed, vocab):
    """Scores after a prefix; they depend on its last two tokens."""
    ends = [e for length in range(3) for e in itertools.product(range(vocab), repeat=length)]
    drawn = torch.randn(len(ends), vocab, generator=torch.Generator().manual_seed(seed)) * 1.5
    rows = dict(zip(ends, drawn, strict=True))
    return lambda prefix: rows[tuple(prefix[-2:])]


class TableEnsemble(EnsembleProposal):
    """The ensemble over tables in place of models."""

    def __init__(self, tables, weights):
        scores = SimpleNamespace(device=torch.device("cpu"), logits=lambda feature: feature, reads_newlines=False)
        super().__init__(scores, ("M", "T", "P", "T-raw")[: len(tables)], weights, newline_id=5)
        self.tables = tables

    def _prefill(self, views, capacity):
        self._cache = Cache(1, capacity)

    def begin(self, first):
        super().begin(first)
        self.committed = (first,)

    def root(self):
        self.paths = []
        return super().root()

    def expand(self, parents, tokens):
        above = [self.paths[p] if p != ROOT else self.committed for p in parents]
        self.paths += [(*a, t) for a, t in zip(above, tokens.tolist(), strict=True)]
        return super().expand(parents, tokens)

    def _forward(self, tokens, places, mask):
        asked = self.paths[-len(tokens) :] if self.paths else [self.committed] * len(tokens)
        return torch.stack([torch.stack([scores(path) for path in asked]) for scores in self.tables])

    def accept(self, verified):
        # The cache holds nothing here, and a path that is no chain would move its entries.
        self._observe(verified)
        self.committed += (*verified.tokens, verified.bonus)


def proposals(drafter, shape, warp, vocab):
    """Every tree that a cycle may draw, with its probability: one where nothing is sampled."""
    root = warp.truncate(drafter.root())
    if not isinstance(shape, list):
        yield shape.grow(root, lambda p, t: warp.truncate(drafter.expand(p, t)), TOP_K, max_levels=9), 1.0
        return
    # Each first token gets the slot of its number.
    after = warp.truncate(drafter.expand([ROOT] * vocab, torch.arange(vocab)))
    q = {(): root.double(), **{(token,): row.double() for token, row in enumerate(after)}}
    for tree, _, weight in trees(shape, q, "sample"):
        inner = [node in tree.children for node in range(tree.num_nodes)]
        slots = tuple(int(t) if i else ROOT for t, i in zip(tree.tokens, inner, strict=True))
        yield replace(tree, slots=slots), weight


def continuation(drafter, shape, rule, scores, warp, vocab, length, seen):
    """Distribution of the next `length` tokens over as many cycles as they take."""
    found = defaultdict(float)

    def p(prefix):
        return warp(scores(prefix)).double()

    def go(drafter, weight):
        prefix = drafter.committed
        if len(prefix) > length:
            found[prefix[1 : length + 1]] += weight
            return
        seen.add(tuple(round(w, 6) for w in drafter.weights.current().tolist()))
        for tree, chance in proposals(drafter, shape, warp, vocab):
            rows = [prefix]
            for parent, token in zip(tree.parents, tree.tokens.tolist(), strict=True):
                rows.append((*rows[parent + 1], token))
            for tokens, more in outcomes(rule, tree, torch.stack([p(row) for row in rows])):
                path, node = [], ROOT
                for token in tokens[:-1]:
                    node = next(c for c in tree.children[node] if int(tree.tokens[c]) == token)
                    path.append(node)
                step = TargetStep(torch.stack([scores(rows[n + 1]) for n in (ROOT, *path)]))
                after = copy.deepcopy(drafter)
                after.accept(Verified(tuple(path), tokens[:-1], tokens[-1], step.logits, step, tree))
                go(after, weight * chance * more)

    go(drafter, 1.0)
    off = 0.0
    for tokens in itertools.product(range(vocab), repeat=length):
        before = [(0, *tokens[:i]) for i in range(length)]
        expected = math.prod(float(p(b)[t]) for b, t in zip(before, tokens, strict=True))
        off += abs(found.get(tokens, 0.0) - expected)
    assert sum(found.values()) == pytest.approx(1, abs=1e-6)
    return off / 2


KINDS = {
    "fixed": FixedWeights(kind="fixed", values=(0.3, 0.7)),
    "grid": GridWeights(kind="grid"),
    "grid-window": GridWeights(kind="grid", score="kl", window=1),
    "inverse": InverseWeights(kind="inverse"),
    "softmax": InverseWeights(kind="inverse", form="softmax", error="tvd"),
}
# What a cycle drafts, and a vocabulary small enough to enumerate the draws.
SHAPES = {"chain": (CHAIN, 2), "fork": (FORK, 2), "static": (Static(FORK), 3), "dynamic": (Dynamic(5, 1, 2), 3)}


def started(kind, vocab, warp):
    drafter = TableEnsemble([table(1, vocab), table(21, vocab)], KINDS[kind].build(2))
    drafter.start(Request(torch.tensor([1]), torch.zeros(1, dtype=torch.int8), None), None, warp, capacity=9)
    drafter.begin(0)
    return drafter


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_enumerated(kind, shape):
    """A sampled chain and a sampled tree, a static and a dynamic tree of likeliest tokens; top-p cuts p and q."""
    (shape, vocab), warp, seen = SHAPES[shape], Warp(0.8, top_p=0.9), set()
    off = continuation(started(kind, vocab, warp), shape, Sampling(), table(0, vocab), warp, vocab, 3, seen)
    assert off < 1e-6
    assert kind == "fixed" or len(seen) > 2, "weights have adapted, and not always alike"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_enumeration_finds_a_wrong_rule(shape):
    (shape, vocab), warp = SHAPES[shape], Warp(0.8)

    class AgainstOneMember(Sampling):
        """Released code's stochastic path: what was drawn from the mixture is verified against one draft's q."""

        def __call__(self, tree, p, uniforms):
            if tree.draft_probs is None:
                return NoResidual()(tree, p, uniforms)
            one = torch.softmax(table(1, vocab)((0,)) / 0.8, -1).double()
            return super().__call__(replace(tree, draft_probs=one.expand_as(tree.draft_probs)), p, uniforms)

    off = continuation(started("grid", vocab, warp), shape, AgainstOneMember(), table(0, vocab), warp, vocab, 2, set())
    assert off > 0.01


# --- which positions the weights are told of ---


class Told:
    """A rule that remembers how many positions it was told of, and whether p and q are those of the same places."""

    adaptive = True

    def __init__(self):
        self.counts = []

    def start(self, device):
        return None

    def current(self):
        return torch.tensor([0.5, 0.5])

    def observe(self, p, q):
        assert p.shape == q.shape[1:] and len(q) == 2
        self.seen = p, q
        self.counts.append(len(p))


@pytest.mark.parametrize("warp", [Warp(), Warp(0.7)], ids=["greedy", "sampling"])
@POLICIES
def test_accepted_positions_and_the_first_rejected_one(big, near, policy, warp):
    """Never the bonus position, never what stands behind a rejection, nothing where nothing was drafted."""
    told = Told()
    drafter = EnsembleProposal(decoder(near), ("M", "M"), told, newline_id=5)
    decoding = Decoding(policy, Greedy() if warp.greedy else Sampling(), TOP_K, warp, 24, ())
    found = generate(target(big), drafter, request(1, 1), decoding, torch.Generator().manual_seed(0)).cycles
    drafted = [c for c in found if c.num_drafted]
    assert len(told.counts) == len(drafted)
    for count, cycle in zip(told.counts, drafted, strict=True):
        # Below a dynamic tree's shallow leaves nothing was drafted, either.
        assert count == min(cycle.num_accepted + 1, cycle.num_drafted) or (
            policy.name == "dynamic" and count == cycle.num_accepted
        )
    assert any(c.num_accepted == c.num_drafted for c in drafted), "some cycles end with a bonus token"
    assert any(c.num_accepted < c.num_drafted for c in drafted)


def test_a_copy_tells_its_own_distributions(big):
    """p and q stand for the same positions: of a copy of the target they are the same."""
    for policy in (Chain(4), Static(TREE), Dynamic(8, 2, 3)):
        told = Told()
        drafter = EnsembleProposal(decoder(copy.deepcopy(big)), ("M", "M"), told, newline_id=5)
        decoding = Decoding(policy, Sampling(), TOP_K, Warp(0.7), 12, ())
        observe, close = told.observe, []

        def compare(p, q, observe=observe, close=close):
            observe(p, q)
            close.append(torch.allclose(q, p.expand_as(q), atol=1e-5))

        told.observe = compare
        generate(target(big), drafter, request(1, 1), decoding, torch.Generator().manual_seed(0))
        assert len(close) > 1 and all(close)


class TableTarget:
    """A table as a target."""

    vocab_size = 3

    def __init__(self, scores):
        self.scores = scores

    def prefill(self, request, taps, *, capacity):
        return [], TargetStep(self.scores(())[None])

    def verify(self, session, root, tree):
        self.rows = [(*session, root)]
        for parent, token in zip(tree.parents, tree.tokens.tolist(), strict=True):
            self.rows.append((*self.rows[parent + 1], token))
        return TargetStep(torch.stack([self.scores(row) for row in self.rows]))

    def commit(self, session, path):
        session[:] = self.rows[path[-1] + 1 if path else 0]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "draw"), [("grid", "sample"), ("inverse", "sample"), ("grid-window", "top-k")])
@pytest.mark.parametrize("policy", [Chain(2), Static(FORK)], ids=["chain", "fork"])
def test_end_to_end(kind, draw, policy):
    """`generate` with adapting weights, 6000 times: four tokens, which take two cycles or more."""
    vocab, warp, scores, n = 3, Warp(0.8), table(0, 3), 6000
    drafter = TableEnsemble([table(1, vocab), table(21, vocab)], KINDS[kind].build(2))
    asked = Request(torch.tensor([1]), torch.zeros(1, dtype=torch.int8), None)
    decoding = Decoding(policy, Sampling(), Draw(draw), warp, 6, ())
    generator, seen = torch.Generator().manual_seed(3), defaultdict(int)
    for _ in range(n):
        seen[tuple(generate(TableTarget(scores), drafter, asked, decoding, generator).tokens[:4])] += 1
    every = list(itertools.product(range(vocab), repeat=4))
    chances = [math.prod(float(warp(scores(t[:i]))[t[i]]) for i in range(4)) for t in every]
    expected = n * torch.tensor(chances, dtype=torch.float64)
    observed = torch.tensor([seen[t] for t in every], dtype=torch.float64)
    rare = expected < 10
    joined = [torch.cat([v[~rare], v[rare].sum()[None]]) for v in (observed, expected)]
    assert chi_square(*joined) < 1
