"""What comes out is distributed as the target: by enumeration, by many draws, and end to end.

The enumeration calls the real rule. A rule looks at uniforms one at a time, so its outcomes are
the leaves of a tree of intervals: each uniform is moved through the breakpoints where the outcome changes.
"""

import itertools
from collections import Counter, defaultdict

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Static, check_combination
from draftsmith.eval.rules import Greedy, Sampling, Verified, inverse_cdf
from draftsmith.models.decoding.tree import ROOT, Tree
from draftsmith.models.decoding.warp import Warp
from tiny import EOS, IMAGE_ID, TOKENS, llava, proposal, request, target

CHAIN = [(0,), (0, 0)]
FORK = [(0,), (1,), (0, 0)]
BUSH = [(0,), (1,), (0, 0), (0, 1), (1, 0)]


def distributions(seed: int, vocab: int):
    """p and q after every prefix of up to two tokens; some q are zero where p is not, and the other way round."""
    generator = torch.Generator().manual_seed(seed)

    def one():
        values = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 2
        return values / values.sum()

    prefixes = [p for length in range(3) for p in itertools.product(range(vocab), repeat=length)]
    return {p: one() for p in prefixes}, {p: one() for p in prefixes}


def trees(shape, q, draw: str):
    """Every tree that the policy can draw, with its probability. Children come in draw order."""
    paths = sorted(shape, key=lambda path: (len(path), path))

    def grow(done, tokens, weight):
        if len(done) == len(paths):
            yield tokens, weight
            return
        parent = paths[len(done)][:-1]
        siblings = [p for p in paths if p[:-1] == parent]
        before = tuple(tokens[parent[:n]] for n in range(1, len(parent) + 1))
        chances = q[before]
        if draw == "top-k":
            choices = [(chances.topk(len(siblings)).indices.tolist(), 1.0)]
        else:
            choices = []
            for order in itertools.permutations(range(len(chances)), len(siblings)):
                chance, left = 1.0, 1.0
                for token in order:
                    chance *= float(chances[token]) / left
                    left -= float(chances[token])
                choices.append((order, chance))
        for order, chance in choices:
            added = dict(zip(siblings, order, strict=True))
            yield from grow([*done, *siblings], {**tokens, **added}, weight * chance)

    for tokens, weight in grow([], {}, 1.0):
        index = {path: n for n, path in enumerate(paths)}
        parents = tuple(index.get(path[:-1], ROOT) for path in paths)
        ids = torch.tensor([tokens[path] for path in paths])
        before = {path: tuple(tokens[path[:n]] for n in range(1, len(path) + 1)) for path in ((), *paths)}
        inner = list(dict.fromkeys(path[:-1] for path in paths))
        probs = torch.stack([q[before[path]] for path in inner]) if draw == "sample" else None
        rows = tuple(inner.index(path[:-1]) for path in paths) if draw == "sample" else ()
        yield (
            Tree(ids, parents, tuple(-1 for _ in paths), probs, rows),
            [before[()], *(before[p] for p in paths)],
            weight,
        )


def outcomes(rule, tree, p):
    """(emitted tokens, probability) of a rule over all uniforms, by splitting each at the points where it decides."""
    size = tree.num_nodes + 1

    def key(uniforms):
        verified = rule(tree, p, uniforms)
        return (verified.path, verified.bonus)

    def split(prefix, weight):
        if len(prefix) == size:
            verified = rule(tree, p, prefix)
            yield (*verified.tokens, verified.bonus), weight
            return
        # The outcome as a function of this uniform, with the later ones at a few fixed places, has few jumps.
        rest = [[v] * (size - len(prefix) - 1) for v in (0.0, 0.3, 0.7, 1 - 1e-12)]

        def signature(value):
            return tuple(key([*prefix, value, *tail]) for tail in rest)

        cuts = [0.0, *sorted(jumps(signature, 0.0, 1 - 1e-12)), 1.0]
        for low, high in itertools.pairwise(cuts):
            if high - low > 1e-13:
                yield from split([*prefix, (low + high) / 2], weight * (high - low))

    yield from split([], 1.0)


def jumps(function, low, high, grid=48):
    """Places where a step function of [low, high] changes, by bisection from a grid."""
    points = [low + (high - low) * i / grid for i in range(grid + 1)]
    values = [function(x) for x in points]
    for (a, fa), (b, fb) in itertools.pairwise(zip(points, values, strict=True)):
        stack = [(a, fa, b, fb)]
        while stack:
            a, fa, b, fb = stack.pop()
            if fa == fb:
                continue
            if b - a < 1e-13:
                yield b
                continue
            middle = (a + b) / 2
            fm = function(middle)
            stack += [(a, fa, middle, fm), (middle, fm, b, fb)]


def emitted_distribution(rule, shape, draw, p, q, vocab):
    """Distribution of the first two tokens; a block of one is completed by the target's own next token."""
    found = torch.zeros(vocab, vocab, dtype=torch.float64)
    for tree, prefixes, weight in trees(shape, q, draw):
        rows = torch.stack([p[prefix] for prefix in prefixes])
        for tokens, chance in outcomes(rule, tree, rows):
            if len(tokens) > 1:
                found[tokens[0], tokens[1]] += weight * chance
            else:
                found[tokens[0]] += weight * chance * p[tokens]
    return found


def wanted(p, vocab):
    return torch.stack([p[()][a] * p[(a,)] for a in range(vocab)])


class NoResidual:
    """A wrong rule: after a rejection it draws from p itself."""

    name = "wrong"

    def __call__(self, tree, p, uniforms):
        right = Sampling()(tree, p, uniforms)
        row = p[(right.path[-1] + 1) if right.path else 0]
        return Verified(right.path, right.tokens, inverse_cdf(row, float(uniforms[-1])), right.target_probs)


@pytest.mark.parametrize("draw", ["top-k", "sample"])
@pytest.mark.parametrize(
    "shape", [CHAIN, FORK, pytest.param(BUSH, marks=pytest.mark.slow)], ids=["chain", "fork", "bush"]
)
def test_enumerated(shape, draw):
    p, q = distributions(0, 3)
    found = emitted_distribution(Sampling(), shape, draw, p, q, 3)
    assert torch.allclose(found.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert (found - wanted(p, 3)).abs().max() < 1e-9


def test_the_enumeration_finds_a_wrong_rule():
    p, q = distributions(0, 3)
    found = emitted_distribution(NoResidual(), CHAIN, "sample", p, q, 3)
    assert (found - wanted(p, 3)).abs().sum() / 2 > 0.02


def draws(rule, policy, draw, p, q, count, seed=0):
    """First two emitted tokens of `count` cycles. Drafter and target are tables."""
    generator = torch.Generator().manual_seed(seed)
    drawing = Draw(draw, generator)
    seen: Counter = Counter()
    accepted = drafted = 0
    vocab = len(p[()])
    for _ in range(count):
        slots: list[tuple[int, ...]] = []

        def expand(parents, tokens, slots=slots):
            before = [slots[i] if i != ROOT else () for i in parents]
            new = [(*b, int(t)) for b, t in zip(before, tokens, strict=True)]
            slots += new
            return torch.stack([q[n] for n in new])

        tree = policy.grow(q[()], expand, drawing, max_levels=2)
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(tree.parents):
            paths.append((*(paths[parent] if parent != ROOT else ()), int(tree.tokens[node])))
        rows = torch.stack([p[()], *(p[path] for path in paths)])
        uniforms = torch.rand(tree.num_nodes + 2, generator=generator, dtype=torch.float64).tolist()
        verified = rule(tree, rows, uniforms[:-1])
        tokens = [*verified.tokens, verified.bonus]
        if len(tokens) == 1:
            tokens.append(inverse_cdf(p[(tokens[0],)], uniforms[-1]))
        seen[tokens[0], tokens[1]] += 1
        accepted, drafted = accepted + verified.num_accepted, drafted + tree.num_levels
    assert 0 < accepted < drafted
    return torch.tensor([[seen[a, b] for b in range(vocab)] for a in range(vocab)], dtype=torch.float64)


def chi_square(observed, expected) -> float:
    """Statistic over its degrees of freedom's 99.99% point (Wilson-Hilferty): below 1 is compatible."""
    keep = expected > 1e-9
    freedom = int(keep.sum()) - 1
    statistic = float(((observed - expected)[keep] ** 2 / expected[keep]).sum())
    point = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    return statistic / point


@pytest.mark.parametrize("draw", ["top-k", "sample"])
@pytest.mark.parametrize("policy", [Chain(2), Static(BUSH)], ids=["chain", "bush"])
def test_twenty_thousand_draws(policy, draw):
    p, q = distributions(7, 5)
    seen = draws(Sampling(), policy, draw, p, q, 20_000)
    assert chi_square(seen, 20_000 * wanted(p, 5)) < 1


def test_the_draws_find_a_wrong_rule():
    p, q = distributions(7, 5)
    seen = draws(NoResidual(), Chain(2), "sample", p, q, 4000)
    assert chi_square(seen, 4000 * wanted(p, 5)) > 3


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "draw"), [(Chain(3), "sample"), (Static(BUSH), "top-k"), (Static(BUSH), "sample")])
def test_end_to_end(policy, draw):
    """`generate` with real tiny models, truncated by top-k and top-p, against the target's own probabilities."""
    big, small = llava(0), llava(1, width=16, layers=1)
    asked, warp = request(2, 1), Warp(1.0, top_k=6, top_p=0.95)
    model, drafter = target(big), proposal(small)
    expected: dict = defaultdict(float)

    def probs(extra):
        ids = torch.cat([asked.ids, torch.tensor(extra, dtype=torch.int64)])
        with torch.no_grad():
            scores = big(input_ids=ids[None], pixel_values=asked.pixels).logits[0, -1]
        scores[TOKENS:] = float("-inf")
        scores[IMAGE_ID] = float("-inf")
        return warp(scores)

    for a in probs([]).nonzero().flatten().tolist():
        after = probs([a])
        for b in after.nonzero().flatten().tolist():
            for c, chance in enumerate(probs([a, b]).tolist()):
                if chance:
                    expected[a, b, c] = float(probs([])[a]) * float(after[b]) * chance
    n = 6000
    generator = torch.Generator().manual_seed(3)
    decoding = Decoding(policy, Sampling(), Draw(draw, generator), warp, 3, ())
    seen: Counter = Counter()
    accepted = drafted = 0
    for _ in range(n):
        result = generate(model, drafter, asked, decoding, generator)
        seen[tuple(result.tokens)] += 1
        accepted += sum(c.num_accepted for c in result.cycles)
        drafted += sum(c.num_drafted for c in result.cycles)
    assert 0 < accepted < drafted
    assert set(seen) <= set(expected)
    # Cells of fewer than ten expected counts are joined, as the chi-square approximation needs.
    common = {k: v for k, v in expected.items() if v * n >= 10}
    rare = 1 - sum(common.values())
    observed = [seen[k] for k in common]
    values = torch.tensor([*observed, n - sum(observed)], dtype=torch.float64)
    assert chi_square(values, n * torch.tensor([*common.values(), rare], dtype=torch.float64)) < 1


@pytest.mark.parametrize("draw", ["top-k", "sample"])
def test_sampling_with_real_models_and_ids_without_a_token(draw):
    """Rows without a token and the image placeholder are never drafted and never emitted, on random targets too."""
    accepted = drafted = 0
    for seed in range(3):
        big, small = llava(seed), llava(seed, layers=1)
        # A loud score for every id that must not come.
        for model in (big, small):
            model.lm_head.weight.data[TOKENS:] *= 50
            model.lm_head.weight.data[IMAGE_ID] *= 50
        generator = torch.Generator().manual_seed(seed)
        decoding = Decoding(Static(BUSH), Sampling(), Draw(draw, generator), Warp(1.0), 40, (EOS,))
        for images in (0, 1):
            result = generate(target(big), proposal(small), request(seed, images), decoding, generator)
            assert all(token < TOKENS and token != IMAGE_ID for token in result.tokens)
            accepted += sum(c.num_accepted for c in result.cycles)
            drafted += sum(c.num_drafted for c in result.cycles)
    assert 0 < accepted < drafted


def test_greedy_is_sampling_at_a_temperature_near_zero():
    big, small = llava(0), llava(1, width=16, layers=1)
    greedy = Decoding(Chain(3), Greedy(), Draw("top-k"), Warp(), 20, (EOS,))
    cold = Decoding(Chain(3), Sampling(), Draw("sample"), Warp(1e-4), 20, (EOS,))
    for seed in range(3):
        expected = generate(target(big), None, request(seed, 1), greedy).tokens
        found = generate(target(big), proposal(small), request(seed, 1), cold, torch.Generator().manual_seed(0))
        assert found.tokens == expected


def test_what_would_not_be_exact_is_refused_by_name():
    with pytest.raises(UserError, match="prunes drawn nodes"):
        check_combination(temperature=1, draw="sample", policy="eagle-2", prunes_by_token=True, rule="sampling")
    with pytest.raises(UserError, match="greedy at a temperature"):
        check_combination(temperature=1, draw="top-k", policy="chain", prunes_by_token=False, rule="greedy")
    with pytest.raises(UserError, match="at temperature 0"):
        check_combination(temperature=0, draw="top-k", policy="chain", prunes_by_token=False, rule="sampling")
