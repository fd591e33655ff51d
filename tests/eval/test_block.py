"""Block verification: the block that comes out is distributed as the target's, and is never shorter on average.

By enumeration of the real rule: its thresholds do not depend on the uniforms, so that moving one of them while the
others refuse shows each, and the outcomes are the patterns of uniforms below and above.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from draftsmith.eval.block import Block
from draftsmith.eval.policies import Chain
from draftsmith.eval.rules import Sampling, Verified, inverse_cdf
from draftsmith.models.decoding.tree import ROOT, Tree, chain, no_tree
from fails import fails_with
from test_exactness import chi_square, distributions, draws, jumps, wanted

REFUSES = 1 - 1e-12  # a uniform that only a certain step accepts


def tables(seed: int, vocab: int, gamma: int, kind: str):
    """p and q after every prefix of up to gamma tokens; "narrow" ones have zeros, "near" ones are much alike."""
    generator = torch.Generator().manual_seed(seed)

    def one():
        values = torch.rand(vocab, generator=generator, dtype=torch.float64) + 0.1
        if kind == "narrow":
            count = int(torch.randint(0, vocab - 1, (), generator=generator))
            values[torch.randperm(vocab, generator=generator)[:count]] = 0
        return values / values.sum()

    prefixes = [t for n in range(gamma + 1) for t in itertools.product(range(vocab), repeat=n)]
    q = {prefix: one() for prefix in prefixes}
    p = {prefix: 0.8 * q[prefix] + 0.2 * one() if kind == "near" else one() for prefix in prefixes}
    return p, q


def chains(p, q, vocab, gamma):
    """Every chain that can be drawn: (tree, rows of p, tokens, probability)."""
    for tokens in itertools.product(range(vocab), repeat=gamma):
        weight = 1.0
        for i, token in enumerate(tokens):
            weight *= float(q[tokens[:i]][token])
        if weight:
            drawn_from = torch.stack([q[tokens[:i]] for i in range(gamma)])
            rows = torch.stack([p[tokens[:i]] for i in range(gamma + 1)])
            yield chain(torch.tensor(tokens), drawn_from), rows, tokens, weight


def block_outcomes(rule, tree, rows):
    """(accepted, bonus, probability) of a rule whose every uniform has a threshold of its own."""
    gamma = tree.num_nodes

    def accepted(uniforms):
        return rule(tree, rows, [*uniforms, 0.5]).num_accepted

    chances = []
    for i in range(gamma):
        alone = [REFUSES] * gamma
        result = jumps(lambda u, alone=alone, i=i: accepted([*alone[:i], u, *alone[i + 1 :]]), 0.0, REFUSES)
        low, high = accepted([*alone[:i], 0.0, *alone[i + 1 :]]), accepted(alone)
        # Unseen: it never accepts, or something later always does (then it does not matter).
        chances.append(next(result) if low != high else float(low == i + 1))
    for pattern in itertools.product([True, False], repeat=gamma):
        weight = 1.0
        for yes, chance in zip(pattern, chances, strict=True):
            weight *= chance if yes else 1 - chance
        if weight < 1e-15:
            continue
        uniforms = [chance / 2 if yes else (1 + chance) / 2 for yes, chance in zip(pattern, chances, strict=True)]
        assert accepted(uniforms) == max((i + 1 for i, yes in enumerate(pattern) if yes), default=0)
        cuts = [0.0, *sorted(jumps(lambda u, us=uniforms: rule(tree, rows, [*us, u]).bonus, 0.0, REFUSES)), 1.0]
        for low, high in itertools.pairwise(cuts):
            verified = rule(tree, rows, [*uniforms, (low + high) / 2])
            yield verified.num_accepted, verified.bonus, weight * (high - low)


def emitted(rule, p, q, vocab, gamma):
    """Distribution of the first gamma+1 tokens, the target's own after the block; and the mean accepted length."""
    result = torch.zeros((vocab,) * (gamma + 1), dtype=torch.float64)
    mean = 0.0
    for tree, rows, tokens, drawn in chains(p, q, vocab, gamma):
        for length, bonus, weight in block_outcomes(rule, tree, rows):
            mean += length * weight * drawn
            block = (*tokens[:length], bonus)
            for rest in itertools.product(range(vocab), repeat=gamma + 1 - len(block)):
                chance = weight * drawn
                for i in range(len(rest)):
                    chance *= float(p[(*block, *rest[:i])][rest[i]])
                result[(*block, *rest)] += chance
    return result, mean


def token_by_token(p, q, vocab, gamma):
    """Mean accepted length of `Sampling` on the same chains: each token is accepted with min(1, p/q)."""
    mean = 0.0
    for _, rows, tokens, drawn in chains(p, q, vocab, gamma):
        reached = drawn
        for i, token in enumerate(tokens):
            reached *= min(1.0, float(rows[i][token]) / float(q[tokens[:i]][token]))
            mean += reached
    return mean


def joint(p, vocab, gamma):
    expected = torch.ones((vocab,) * (gamma + 1), dtype=torch.float64)
    for tokens in itertools.product(range(vocab), repeat=gamma + 1):
        for i in range(gamma + 1):
            expected[tokens] *= p[tokens[:i]][tokens[i]]
    return expected


def sizes(*slow):
    """Chains of every length and kind; `slow` ones, the largest sums, in the slow tests."""
    cases = itertools.product([(1, 5), (2, 4), (3, 3)], ["wide", "narrow", "near"])
    return [pytest.param(*size, kind, marks=pytest.mark.slow if (*size, kind) in slow else ()) for size, kind in cases]


@pytest.mark.parametrize(("gamma", "vocab", "kind"), sizes((3, 3, "wide"), (2, 4, "near")))
def test_the_block_is_distributed_as_the_target_and_longer(gamma, vocab, kind):
    gains = []
    for seed in range(2):
        p, q = tables(seed, vocab, gamma, kind)
        result, length = emitted(Block(), p, q, vocab, gamma)
        assert float(result.sum()) == pytest.approx(1, abs=1e-9)
        assert (result - joint(p, vocab, gamma)).abs().max() < 1e-9
        gains.append(length - token_by_token(p, q, vocab, gamma))
    if gamma == 1:
        assert gains == pytest.approx([0, 0], abs=1e-9)
    else:
        assert min(gains) > -1e-9 and max(gains) > 1e-3


class TokenResidual(Block):
    """A wrong rule: after a block it draws from what token-by-token verification would."""

    def __call__(self, tree, p, uniforms):
        right = super().__call__(tree, p, uniforms)
        kept = right.num_accepted
        if kept == tree.num_nodes:
            return right
        left = (p[kept] - tree.draft_probs[kept]).clamp(min=0)
        return replace(right, bonus=inverse_cdf(left if left.any() else p[kept], uniforms[-1]))


class OnlyWeights(Block):
    """A wrong rule: every prefix is accepted as if it were the whole chain."""

    def __call__(self, tree, p, uniforms):
        weights, kept = [1.0], 0
        for i, token in enumerate(tree.tokens.tolist()):
            weights.append(min(1.0, weights[-1] * float(p[i, token] / tree.draft_probs[i, token])))
            kept = i + 1 if uniforms[i] < weights[-1] else kept
        rest = p[kept]
        if kept < tree.num_nodes:
            rest = (weights[kept] * rest - tree.draft_probs[kept]).clamp(min=0)
        bonus = inverse_cdf(rest if rest.any() else p[kept], uniforms[-1])
        path = tuple(range(kept))
        return Verified(path, tuple(tree.tokens[:kept].tolist()), bonus)


@pytest.mark.parametrize("wrong", [TokenResidual(), OnlyWeights()], ids=lambda rule: type(rule).__name__)
def test_the_enumeration_finds_a_wrong_rule(wrong):
    distances = []
    for seed in range(3):
        p, q = tables(seed, 4, 2, "wide")
        result, _ = emitted(wrong, p, q, 4, 2)
        assert float(result.sum()) == pytest.approx(1, abs=1e-9)
        distances.append(float((result - joint(p, 4, 2)).abs().sum() / 2))
    assert max(distances) > 0.001


def test_one_token_is_verified_as_by_sampling():
    generator = torch.Generator().manual_seed(0)
    for seed in range(200):
        p, q = tables(seed, 6, 1, "wide")
        token = torch.multinomial(q[()], 1, generator=generator)
        tree, rows = chain(token, q[()][None]), torch.stack([p[()], p[(int(token),)]])
        uniforms = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        block, exact = Block()(tree, rows, uniforms), Sampling()(tree, rows, uniforms)
        assert (block.path, block.tokens, block.bonus) == (exact.path, exact.tokens, exact.bonus)


def test_a_drafter_that_is_the_target_is_always_right():
    p, _ = tables(0, 4, 3, "wide")
    for tree, rows, tokens, _ in chains(p, p, 4, 3):
        for uniform in (0.0, 0.5, REFUSES):
            assert Block()(tree, rows, [uniform] * 4).tokens == tokens
            single = replace(tree, draft_probs=tree.draft_probs.float())
            assert Block()(single, rows.float(), [uniform] * 4).tokens == tokens


def test_five_thousand_draws():
    """Through the policy and its own draws."""
    p, q = distributions(7, 5)
    seen = draws(Block(), Chain(2), "sample", p, q, 5000)
    assert chi_square(seen, 5000 * wanted(p, 5)) < 1


def test_what_it_cannot_verify_is_refused():
    p = torch.full((3, 4), 0.25)
    branching = Tree(torch.tensor([0, 1]), (ROOT, ROOT), (-1, -1), p[:1], (0, 0))
    fails_with("a tree that branches", Block(), branching, p, [0.5] * 3)
    fails_with("not drawn", Block(), chain(torch.tensor([0, 1])), p, [0.5] * 3)


def test_nothing_proposed():
    p = torch.tensor([[0.25, 0.75]])
    result = Block()(no_tree(), p, [0.5])
    assert (result.path, result.tokens, result.bonus) == ((), (), 1)
