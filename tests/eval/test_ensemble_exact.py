"""Ensembles above temperature 0 leave the target's distribution as it is: by enumeration, and end to end.

What is enumerated is whole cycles in a row, so that the weights have adapted before they are used.
"""

import copy
import itertools
import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.batch import Request
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Static
from draftsmith.eval.rules import Sampling, Verified
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.ensemble import EnsembleProposal
from draftsmith.models.drafters.weights import FixedWeights, GridWeights, InverseWeights
from draftsmith.models.targets.base import TargetStep
from test_exactness import CHAIN, FORK, NoResidual, chi_square, outcomes, trees

TOP_K = Draw("top-k")


def table(seed, vocab):
    """Scores after a prefix; they depend on its last two tokens."""
    ends = [e for length in range(3) for e in itertools.product(range(vocab), repeat=length)]
    drawn = torch.randn(len(ends), vocab, generator=torch.Generator().manual_seed(seed)) * 1.5
    rows = dict(zip(ends, drawn, strict=True))
    return lambda prefix: rows[tuple(prefix[-2:])]


class TableEnsemble(EnsembleProposal):
    """The ensemble over tables in place of models."""

    def __init__(self, tables, weights):
        scores = SimpleNamespace(
            device=torch.device("cpu"), logits=lambda feature: feature, reads_newlines=False, reads_first=True
        )
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
    # Each first token gets the input of its number.
    after = warp.truncate(drafter.expand([ROOT] * vocab, torch.arange(vocab)))
    q = {(): root.double(), **{(token,): row.double() for token, row in enumerate(after)}}
    for tree, _, weight in trees(shape, q, "sample"):
        inner = [node in tree.children for node in range(tree.num_nodes)]
        expansions = tuple(int(t) if i else ROOT for t, i in zip(tree.tokens, inner, strict=True))
        yield replace(tree, expansions=expansions), weight


def continuation(drafter, shape, rule, scores, warp, vocab, length, seen):
    """Distribution of the next `length` tokens over as many cycles as they take."""
    actual = defaultdict(float)

    def p(prefix):
        return warp(scores(prefix)).double()

    def go(drafter, weight):
        prefix = drafter.committed
        if len(prefix) > length:
            actual[prefix[1 : length + 1]] += weight
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
        off += abs(actual.get(tokens, 0.0) - expected)
    assert sum(actual.values()) == pytest.approx(1, abs=1e-6)
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


class TableTarget:
    """A table as a target."""

    vocab_size, device = 3, torch.device("cpu")

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
