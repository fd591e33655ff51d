"""An end token ends the drafting: nothing is proposed after it, and nothing after it is counted.

The scripted target and drafter know one distribution for every prefix. The output's distribution is enumerated through
`generate`: every choice of the prefill, of a sampled draw and of the rule is taken in turn.
"""

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
import torch
from decodings import greedy
from draftsmith.eval import loop
from draftsmith.eval.block import Block
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Static, chain, static
from draftsmith.eval.policies.dynamic import Dynamic
from draftsmith.eval.policies.sage import Sage, SageTree
from draftsmith.eval.rules import Greedy, Sampling, Verified
from draftsmith.models.decoding.warp import Distributions, Warp
from exact import TableDrafter, TableTarget, told
from test_block import block_outcomes
from test_exactness import NoResidual, outcomes
from tiny import llava, near, proposal, request, self_draft, target

TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
END = 0  # of the scripted vocabulary


def policies():
    """Fresh ones: some adapt from cycle to cycle."""
    return {
        "chain": Chain(4),
        "static": Static(TREE),
        "dynamic": Dynamic(12, 3, 3),
        "sage, online": Sage(SageTree(kind="sage", threshold="local")),
        "sage, template": Sage(SageTree(kind="sage", growth="template")),
        "sage, dynamic": Sage(SageTree(kind="sage", growth="dynamic")),
    }


# ---- real models


class Counted:
    """Counts the passes of a drafter, and keeps the trees that were grown on it."""

    def __init__(self, inner):
        self.inner, self.passes, self.trees = inner, 0, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def root(self):
        self.passes += 1
        return self.inner.root()

    def expand(self, parents, tokens):
        self.passes += 1
        return self.inner.expand(parents, tokens)

    def accept(self, verified):
        self.trees.append(verified.tree)
        self.inner.accept(verified)


def ends_inside(big, asked, after):
    """An end token that a copy of the target drafts: the answer's own token at place `after`, where it comes first."""
    free = generate(target(big), None, asked, greedy(Chain(1), 24, ())).tokens
    return free, free[after]


@pytest.mark.covering
@pytest.mark.parametrize("name", policies())
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_nothing_is_drafted_behind_an_end_token_and_nothing_behind_it_is_counted(name, sampled):
    big, seen = llava(0), Counter()
    for seed, place in itertools.product(range(2), (1, 2, 4, 7)):
        asked = request(seed, 1)
        free, eos = ends_inside(big, asked, place)
        policy = policies()[name]
        drafter = Counted(proposal(near(big)) if sampled else self_draft(big))
        warp, draw = Warp(1.0 if sampled else 0.0), "sample" if sampled and not policy.prunes_by_token else "top-k"
        decoding = Decoding(policy, Sampling() if sampled else Greedy(), Draw(draw), warp, 24, (eos,))
        generator = torch.Generator().manual_seed(place) if sampled else None
        result = generate(target(big), drafter, asked, decoding, generator)
        if not sampled:
            assert result.tokens == free[: free.index(eos) + 1]
        for tree in drafter.trees:
            ends = {node for node, token in enumerate(tree.tokens.tolist()) if token == eos}
            assert not ends & set(tree.parents), "a node stands below an end token"
            seen["drafted"] += bool(ends)
        assert all(c.num_accepted == c.num_emitted - 1 <= c.num_drafted for c in result.cycles)
        assert sum(c.num_emitted for c in result.cycles) == len(result.tokens) - 1
    assert seen["drafted"] > 3


def test_passes_that_an_answer_of_one_word_costs():
    """The end token is the second token of the answer: one pass finds it, where gamma were made before."""
    big, made = llava(0), []
    for seed in range(4):
        asked = request(seed, 1)
        _, eos = ends_inside(big, asked, 1)
        drafter = Counted(self_draft(big))
        result = generate(target(big), drafter, asked, greedy(Chain(5), 24, (eos,)))
        made.append((len(result.tokens), drafter.passes))
        if len(result.tokens) == 2:
            (cycle,) = result.cycles
            assert (cycle.num_planned, cycle.num_drafted, cycle.num_accepted, cycle.num_emitted) == (5, 1, 0, 1)
    assert made.count((2, 1)) >= 3


@pytest.mark.parametrize("policy", [Chain(5), Static(TREE)], ids=["chain", "static"])
def test_a_gpu_that_drafts_behind_the_end_expects_by_equation_1_what_a_cpu_does(monkeypatch, policy):
    """A GPU does not look for ends while it drafts: its trees are deeper, and what was planned is the same."""
    big, asked = llava(0), request(0, 1)
    _, eos = ends_inside(big, asked, 2)
    cycles = []
    for looks in (chain.ends_read, lambda draw, device: frozenset()):
        monkeypatch.setattr(chain, "ends_read", looks)
        monkeypatch.setattr(static, "ends_read", looks)
        cycles.append(generate(target(big), self_draft(big), asked, greedy(policy, 24, (eos,))).cycles)
    read, unread = ([(c.num_planned, c.num_accepted, c.num_emitted) for c in some] for some in cycles)
    assert read == unread and {planned for planned, *_ in read} == {policy.num_levels}
    assert [c.num_drafted for c in cycles[0]] < [c.num_drafted for c in cycles[1]] == [policy.num_levels]


def test_a_drafter_of_fewer_levels_plans_no_more_than_it_has():
    big = llava(0)
    drafter = Counted(self_draft(big))
    drafter.max_levels = 2
    result = generate(target(big), drafter, request(0, 1), greedy(Chain(5), 12, ()))
    *whole, last = result.cycles
    assert [c.num_planned for c in whole] == [2] * len(whole) and last.num_planned in (0, 2)


def test_the_end_token_of_a_path_takes_the_bonus_tokens_place():
    whole = Verified((0, 2, 5), (7, 9, 8), 6)
    cut = whole.until_end({9})
    assert (cut.path, cut.tokens, cut.bonus, cut.ended) == ((0,), (7,), 9, True)
    assert whole.until_end({6}) is whole and not whole.ended, "the target's own end token was drafted by nobody"
    assert whole.until_end({7}).num_accepted == 0


# ---- by enumeration


@dataclass
class Choices:
    """One run through a tree of choices: the first ones as given, then the first option of each further choice."""

    given: list[int]

    def __post_init__(self):
        self.weight, self.made = 1.0, []  # (which, of how many)

    def take(self, weights):
        which = self.given[len(self.made)] if len(self.made) < len(self.given) else 0
        self.made.append((which, len(weights)))
        self.weight *= float(weights[which])
        return which


def all_runs(run):
    """(result, weight) of `run(choices)` for every way to choose."""
    given: list[int] | None = []
    while given is not None:
        choices = Choices(given)
        result = run(choices)
        yield result, choices.weight
        made = choices.made
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        given = [*(which for which, _ in made[:-1]), made[-1][0] + 1] if made else None


class Enumerated:
    """A rule whose every outcome is chosen in turn."""

    def __init__(self, rule, choices, known):
        self.rule, self.choices, self.known, self.name = rule, choices, known, "enumerated"

    def __call__(self, tree, p, uniforms):
        assert len(uniforms) == tree.num_nodes + 1
        p = Distributions.of(p).whole()
        key = (tuple(tree.tokens.tolist()), tree.parents, p.numpy().tobytes())
        if tree.draft_probs is not None:
            key += (tree.draft_probs.numpy().tobytes(),)
        if key not in self.known:
            found = defaultdict(float)
            if isinstance(self.rule, Block) and tree.num_nodes:
                for length, bonus, weight in block_outcomes(self.rule, tree, p):
                    found[tuple(range(length)), bonus] += weight
            else:
                for tokens, weight in outcomes(self.rule, tree, p):
                    found[told(tree, tokens[:-1]).path, tokens[-1]] += weight
            self.known[key] = list(found.items())
        options = self.known[key]
        (path, bonus), _ = options[self.choices.take([weight for _, weight in options])]
        return Verified(path, tuple(int(tree.tokens[n]) for n in path), bonus)


@dataclass(frozen=True)
class DrawInTurn(Draw):
    """Samples without replacement, every one of them in turn."""

    choices: Choices | None = None

    def __call__(self, q, count):
        if not self.sampled:
            return super().__call__(q, count)
        rows = []
        for row in q:
            left, tokens = row.clone(), []
            for _ in range(count):
                if not left.any():  # any other token may fill the place
                    left = torch.tensor([float(t not in tokens) for t in range(len(row))])
                options = left.nonzero().flatten().tolist()
                tokens.append(options[self.choices.take([float(left[t] / left.sum()) for t in options])])
                left[tokens[-1]] = 0
            rows.append(tokens)
        return torch.tensor(rows)

    def seeded(self, generator, device):
        return self


def scripted(seed, vocab, length):
    """Logits after every prefix of an answer."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = (p for n in range(length + 1) for p in itertools.product(range(vocab), repeat=n))
    logits = {p: torch.randn(vocab, generator=generator) for p in prefixes}

    def after(prefix):
        # After an end token nothing is ever asked: an answer holds it at its end alone.
        assert END not in prefix[:-1]
        return logits[tuple(prefix)]

    return after


def answers(script, warp, limit):
    """The target's own distribution of whole answers, by the formula."""
    result = {}

    def go_on(tokens, chance):
        if tokens and (tokens[-1] == END or len(tokens) == limit):
            result[tokens] = chance
            return
        for token, p in enumerate(warp(script(tokens)).tolist()):
            if p:
                go_on((*tokens, token), chance * p)

    go_on((), 1.0)
    return result


def enumerated(monkeypatch, policy, rule, draw, warp, *, limit, vocab=3, seed=1):
    """The distribution of `generate`'s answers, every choice taken in turn, and what was accepted."""
    big, small, known, seen = scripted(seed, vocab, limit), scripted(seed + 50, vocab, limit), {}, Counter()

    def run(choices):
        monkeypatch.setattr(loop, "inverse_cdf", lambda probs, uniform: choices.take(probs.tolist()))
        decoding = Decoding(
            policy(), Enumerated(rule, choices, known), DrawInTurn(draw, choices=choices), warp, limit, (END,)
        )
        generator = torch.Generator().manual_seed(0)
        result = generate(TableTarget(big, vocab), TableDrafter(small), None, decoding, generator)
        seen.update(accepted=sum(c.num_accepted for c in result.cycles), cycles=len(result.cycles))
        seen["runs"] += 1
        return tuple(result.tokens)

    found = defaultdict(float)
    for tokens, weight in all_runs(run):
        if weight:
            found[tokens] += weight
    return found, answers(big, warp, limit), seen


def distance(found, wanted):
    return sum(abs(found.get(k, 0.0) - wanted.get(k, 0.0)) for k in {*found, *wanted}) / 2


SHAPES = {
    "chain": (lambda: Chain(2), "top-k", Sampling()),
    "chain, sampled": (lambda: Chain(2), "sample", Sampling()),
    "chain, sampled, block": (lambda: Chain(2), "sample", Block()),
    "static": (lambda: Static([(0,), (1,), (0, 0), (1, 0)]), "top-k", Sampling()),
    "static, sampled": (lambda: Static([(0,), (1,), (0, 0)]), "sample", Sampling()),
    "dynamic": (lambda: Dynamic(6, 1, 2), "top-k", Sampling()),
}


@pytest.mark.parametrize("cut", [Warp(1.0), Warp(1.0, top_k=2), Warp(1.0, top_p=0.8)], ids=["whole", "top-k", "top-p"])
@pytest.mark.parametrize("name", SHAPES)
def test_whole_answers_are_distributed_as_the_targets_own(monkeypatch, name, cut):
    """Answers of up to four tokens, most of which end before; with the target's distribution whole and cut."""
    policy, draw, rule = SHAPES[name]
    found, wanted, seen = enumerated(monkeypatch, policy, rule, draw, cut, limit=4)
    assert math.isclose(sum(found.values()), 1.0, abs_tol=1e-6)
    assert distance(found, wanted) < 1e-5
    assert seen["accepted"] and seen["runs"] >= 8
    assert sum(chance for answer, chance in wanted.items() if len(answer) > 1 and answer[-1] == END) > 0.2


def test_the_enumeration_finds_what_is_wrong(monkeypatch):
    """Guards the test above: a rule that forgets the residual, and a target that is not cut."""
    policy, draw, _ = SHAPES["static"]
    found, wanted, _ = enumerated(monkeypatch, policy, NoResidual(), draw, Warp(1.0), limit=3)
    assert distance(found, wanted) > 0.02
    found, cut, _ = enumerated(monkeypatch, policy, Sampling(), draw, Warp(1.0, top_k=2), limit=3)
    assert distance(found, cut) < 1e-5 and distance(found, answers(scripted(1, 3, 3), Warp(1.0), 3)) > 0.05
