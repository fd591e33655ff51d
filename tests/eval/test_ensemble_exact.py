"""Ensembles above temperature 0 leave the target's distribution as it is: by enumeration, and end to end.

What is enumerated is whole cycles in a row, so that the weights have adapted before they are used.
"""

import copy
import itertools
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.batch import Request
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Draw, Dynamic, Static
from draftsmith.eval.rules import Sampling, Verified
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.ensemble import EnsembleProposal
from draftsmith.models.drafters.weights import FixedWeights, GridWeights, InverseWeights, weights_of
from draftsmith.models.targets.base import TargetStep
from exact import TableTarget, chances, check_drawn, prefixes, told
from test_exactness import CHAIN, FORK, NoResidual, outcomes, trees
from test_trees import off_target

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
    """How far the next `length` tokens, over as many cycles as they take, are from the target's."""
    actual = defaultdict(float)

    def p(prefix):
        return warp(scores(prefix)).double()

    def go(drafter, weight):
        prefix = drafter.committed
        if len(prefix) > length:
            actual[prefix[1 : length + 1]] += weight
            return
        seen.add(tuple(round(w, 6) for w in drafter.weights.current.tolist()))
        for tree, chance in proposals(drafter, shape, warp, vocab):
            rows = prefixes(tree, prefix)
            for tokens, more in outcomes(rule, tree, torch.stack([p(row) for row in rows])):
                path = told(tree, tokens[:-1]).path
                step = TargetStep(torch.stack([scores(rows[n + 1]) for n in (ROOT, *path)]))
                after = copy.deepcopy(drafter)
                after.accept(Verified(path, tokens[:-1], tokens[-1], step, tree))
                go(after, weight * chance * more)

    go(drafter, 1.0)
    assert sum(actual.values()) == pytest.approx(1, abs=1e-6)
    return off_target(actual, p, vocab, length)


def check_enumerated(started, kind, shape):
    """A sampled chain and a sampled tree, a static and a dynamic tree of likeliest tokens; top-p cuts p and q."""
    (shape, vocab), warp, seen = SHAPES[shape], Warp(0.8, top_p=0.9), set()
    off = continuation(started(kind, vocab, warp), shape, Sampling(), table(0, vocab), warp, vocab, 3, seen)
    assert off < 1e-6
    assert kind == "fixed" or len(seen) > 2, "weights have adapted, and not always alike"


KINDS = {
    "fixed": FixedWeights(kind="fixed", values=(0.3, 0.7)),
    "grid": GridWeights(kind="grid"),
    "grid-window": GridWeights(kind="grid", score="kl", window=1),
    "inverse": InverseWeights(kind="inverse"),
    "softmax": InverseWeights(kind="inverse", form="softmax", error="tvd"),
}
# What a cycle drafts, and a vocabulary small enough to enumerate the draws.
SHAPES = {"chain": (CHAIN, 2), "fork": (FORK, 2), "static": (Static(FORK), 3), "dynamic": (Dynamic(5, 1, 2), 3)}


ASKED = Request(torch.tensor([1]), torch.zeros(1, dtype=torch.int8), None)


def ensemble_of(kind, vocab):
    return TableEnsemble([table(1, vocab), table(21, vocab)], weights_of(KINDS[kind], 2))


def started(kind, vocab, warp):
    drafter = ensemble_of(kind, vocab)
    drafter.start(ASKED, None, warp, capacity=9)
    drafter.begin(0)
    return drafter


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_enumerated(kind, shape):
    check_enumerated(started, kind, shape)


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


def test_end_to_end():
    """`generate` with adapting weights and a sampled tree: four tokens, which take two cycles or more."""
    warp, scores, generator = Warp(0.8), table(0, 3), torch.Generator().manual_seed(3)
    model, drafter = TableTarget(scores, 3), ensemble_of("grid", 3)
    decoding = Decoding(Static(FORK), Sampling(), Draw("sample"), warp, 6, ())
    expected = chances(lambda ids: warp(scores(ids)), 4)
    check_drawn(expected, lambda: generate(model, drafter, ASKED, decoding, generator), 1500)
