"""What comes out is distributed as the target: by enumeration, by many draws, and end to end.

The enumeration calls the real rule. A rule looks at uniforms one at a time, so its outcomes are
the leaves of a tree of intervals: each uniform is moved through the breakpoints where the outcome changes.
Wrong rules go through the same checks, which must find them.
"""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from decodings import greedy
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Static
from draftsmith.eval.rules import Greedy, Sampling, inverse_cdf
from draftsmith.models.decoding.tree import ROOT, Tree
from draftsmith.models.decoding.warp import Distributions, Warp
from exact import Expands, accepted_of_drafted, chances, check_drawn, chi_square, prefixes
from tiny import EOS, IMAGE_ID, TOKENS, llava, next_scores, proposal, request, target

CHAIN = [(0,), (0, 0)]
FORK = [(0,), (1,), (0, 0)]
BUSH = [(0,), (1,), (0, 0), (0, 1), (1, 0)]


def distributions(seed: int, vocab: int, kind: str = "wide"):
    """p and q after every prefix of up to two tokens.

    "wide" ones are positive everywhere. "narrow" ones are what top-k and top-p leave: p has zeros, and q holds one or
    two tokens, fewer than some shapes have children.
    """
    generator = torch.Generator().manual_seed(seed)

    def one(most: int):
        values = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 2
        if kind == "narrow":
            kept = int(torch.randint(1, most + 1, (), generator=generator))
            values[torch.randperm(vocab, generator=generator)[kept:]] = 0
        return values / values.sum()

    prefixes = [p for length in range(3) for p in itertools.product(range(vocab), repeat=length)]
    return {p: one(vocab) for p in prefixes}, {p: one(2) for p in prefixes}


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
                chance, left = 1.0, chances.clone()
                for place, token in enumerate(order):
                    # Once q is exhausted any other token may fill the place.
                    exhausted = not left.any()
                    chance *= 1 / (len(left) - place) if exhausted else float(left[token] / left.sum())
                    left[token] = 0
                if chance:
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

    def run(uniforms):
        """The outcome, and how many uniforms it took; those after the given ones are 1/2."""
        taken = 0

        def tape():
            nonlocal taken
            for value in itertools.chain(uniforms, itertools.repeat(0.5)):
                taken += 1
                yield value

        verified = rule(tree, p, tape())
        assert taken <= tree.num_nodes + 1
        return (verified.path, verified.tokens, verified.bonus), taken

    def split(prefix, weight):
        (_, tokens, bonus), taken = run(prefix)
        if taken <= len(prefix):
            yield (*tokens, bonus), weight
            return
        # Accepting a node puts it on the path whatever comes later, so that one tail shows every decision.
        cuts = [0.0, *sorted(jumps(lambda value: run([*prefix, value])[0], 0.0, 1 - 1e-12)), 1.0]
        for low, high in itertools.pairwise(cuts):
            if high - low > 1e-12:
                yield from split([*prefix, (low + high) / 2], weight * (high - low))

    yield from split([], 1.0)


def jumps(function, low, high, grid=6):
    """Places where a step function of [low, high] changes, by bisection from a grid."""
    points = [low + (high - low) * i / grid for i in range(grid + 1)]
    values = [function(x) for x in points]
    stack = [(a, fa, b, fb) for (a, fa), (b, fb) in itertools.pairwise(zip(points, values, strict=True))]
    while stack:
        a, fa, b, fb = stack.pop()
        if fa == fb:
            continue
        if b - a < 1e-12:
            yield b
            continue
        middle = (a + b) / 2
        fm = function(middle)
        stack += [(a, fa, middle, fm), (middle, fm, b, fb)]


def emitted_distribution(rule, shape, draw, p, q, vocab):
    """Distribution of the first two tokens; a block of one is completed by the target's own next token."""
    result = torch.zeros(vocab, vocab, dtype=torch.float64)
    for tree, before, weight in trees(shape, q, draw):
        rows = torch.stack([p[prefix] for prefix in before])
        for tokens, chance in outcomes(rule, tree, rows):
            if len(tokens) > 1:
                result[tokens[0], tokens[1]] += weight * chance
            else:
                result[tokens[0]] += weight * chance * p[tokens]
    return result


def wanted(p, vocab):
    return torch.stack([p[()][a] * p[(a,)] for a in range(vocab)])


class NoResidual:
    """A wrong rule: after a rejection it draws from p itself."""

    def __call__(self, tree, p, uniforms):
        taken, draws = [], iter(uniforms)
        right = Sampling()(tree, p, (taken.append(u) or u for u in draws))
        last = right.path[-1] if right.path else ROOT
        # Where the draw itself rejects the children, one more draw may give them again.
        again = tree.draft_probs is None and last in tree.children
        return replace(right, bonus=inverse_cdf(Distributions.of(p).row(last + 1), next(draws) if again else taken[-1]))


class AnotherQ:
    """A wrong rule: it takes proposals for samples of a flat q, whatever they were drawn from."""

    def __call__(self, tree, p, uniforms):
        flat = torch.full((1, p.shape[-1]), 1 / p.shape[-1], dtype=p.dtype)
        return Sampling()(replace(tree, draft_probs=flat, parent_rows=(0,) * tree.num_nodes), p, uniforms)


class WithReplacement:
    """A wrong rule: a rejected sibling does not leave q, as if the next one had been drawn afresh."""

    def __call__(self, tree, p, uniforms):
        draws = iter(uniforms)
        node, path = ROOT, []
        while True:
            rest = p[node + 1]
            for child in tree.children.get(node, ()):
                q, token = tree.draft_probs[tree.parent_rows[child]], tree.tokens[child]
                if next(draws) < rest[token] / q[token]:
                    node = child
                    path.append(child)
                    break
                rest = (rest - q).clamp(min=0)
                rest = rest / rest.sum()
            else:
                bonus = inverse_cdf(rest, next(draws))
                return replace(
                    Greedy()(tree, p), path=tuple(path), tokens=tuple(tree.tokens[path].tolist()), bonus=bonus
                )


@pytest.mark.covering
@pytest.mark.parametrize("draw", ["top-k", "sample"])
@pytest.mark.parametrize(("shape", "vocab"), [(CHAIN, 4), (FORK, 4), (BUSH, 3)], ids=["chain", "fork", "bush"])
@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_enumerated(shape, vocab, kind, draw):
    for seed in (0,) if kind == "wide" else (1, 2, 3):
        p, q = distributions(seed, vocab, kind)
        result = emitted_distribution(Sampling(), shape, draw, p, q, vocab)
        assert float(result.sum()) == pytest.approx(1, abs=1e-9)
        assert (result - wanted(p, vocab)).abs().max() < 1e-9


def test_a_sibling_that_q_gives_nothing_is_a_point_mass():
    """q holds one token and the shape wants three: fillers are no draws, and dividing by their q takes them."""
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).expand(4, 3)
    q = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    tree = Tree(torch.tensor([0, 1, 2]), (ROOT,) * 3, (-1,) * 3, q, (0,) * 3)
    result = torch.zeros(3, dtype=torch.float64)
    for tokens, chance in outcomes(Sampling(), tree, p):
        result[tokens[0]] += chance
    assert torch.allclose(result, p[0], atol=1e-9)


@pytest.mark.parametrize(("rule", "shape", "draw"), [
    (NoResidual(), CHAIN, "sample"),
    (NoResidual(), FORK, "top-k"),
    (AnotherQ(), CHAIN, "top-k"),
    (AnotherQ(), FORK, "sample"),
    (WithReplacement(), FORK, "sample"),
], ids=lambda value: type(value).__name__ if callable(value) else None)  # fmt: skip
def test_the_enumeration_finds_a_wrong_rule(rule, shape, draw):
    p, q = distributions(2, 3)
    result = emitted_distribution(rule, shape, draw, p, q, 3)
    assert float(result.sum()) == pytest.approx(1, abs=1e-9)
    assert (result - wanted(p, 3)).abs().sum() / 2 > 0.01


@torch.inference_mode()
def draws(rule, policy, draw, p, q, count, seed=0):
    """First two emitted tokens of `count` cycles [V,V]. Drafter and target are tables, with one row for each prefix."""
    generator = torch.Generator().manual_seed(seed)
    drawing, vocab = Draw(draw, generator), len(p[()])

    def propose():
        tree = policy.grow(q[()], Expands(q.__getitem__), drawing, max_levels=2)
        return tree, torch.stack([p[row] for row in prefixes(tree)])

    uniforms = torch.rand(count, policy.max_nodes + 2, generator=generator, dtype=torch.float64).tolist()
    fixed = None if drawing.sampled else propose()
    seen: Counter = Counter()
    accepted = drafted = 0
    for row in uniforms:
        tree, probs = fixed or propose()
        verified = rule(tree, probs, row[:-1])
        tokens = [*verified.tokens, verified.bonus]
        if len(tokens) == 1:
            tokens.append(inverse_cdf(p[tuple(tokens)], row[-1]))
        seen[tokens[0], tokens[1]] += 1
        accepted, drafted = accepted + verified.num_accepted, drafted + tree.num_levels
    assert 0 < accepted < drafted
    return torch.tensor([[seen[a, b] for b in range(vocab)] for a in range(vocab)], dtype=torch.float64)


@pytest.mark.covering
@pytest.mark.parametrize("draw", ["top-k", "sample"])
@pytest.mark.parametrize("policy", [Chain(2), Static(FORK)], ids=["chain", "fork"])
def test_twenty_thousand_draws(policy, draw):
    p, q = distributions(7, 5)
    seen = draws(Sampling(), policy, draw, p, q, 20_000)
    assert chi_square(seen, 20_000 * wanted(p, 5)) < 1


@pytest.mark.parametrize(("rule", "policy", "draw"), [
    (NoResidual(), Chain(2), "sample"),
    (AnotherQ(), Static(FORK), "top-k"),
    (WithReplacement(), Static(FORK), "sample"),
], ids=["no-residual", "another-q", "with-replacement"])  # fmt: skip
def test_the_draws_find_a_wrong_rule(rule, policy, draw):
    p, q = distributions(2, 3)
    seen = draws(rule, policy, draw, p, q, 2000)
    assert chi_square(seen, 2000 * wanted(p, 3)) > 2


@pytest.mark.parametrize(
    ("policy", "draw", "n"),
    [
        (Static(BUSH), "sample", 300),
        *(pytest.param(*case, 4000, marks=pytest.mark.slow)
          for case in ((Chain(3), "sample"), (Static(BUSH), "top-k"), (Static(BUSH), "sample"))),
    ],
)  # fmt: skip
def test_end_to_end(big, near, policy, draw, n):
    """`generate` with real tiny models, truncated by top-k and top-p, against the target's own probabilities."""
    # Narrow enough that q often holds fewer tokens than the tree has children.
    asked, warp = request(2, 1), Warp(1.0, top_k=4, top_p=0.7)
    generator, model, drafter = torch.Generator().manual_seed(3), target(big), proposal(near)
    # The first cycle of four tokens drafts two levels, and the tokens that are compared are theirs.
    decoding = Decoding(policy, Sampling(), Draw(draw), warp, 4, ())
    expected = chances(lambda ids: warp(next_scores(big, asked, ids)), 3)
    results = check_drawn(expected, lambda: generate(model, drafter, asked, decoding, generator), n)
    accepted, drafted = accepted_of_drafted(results)
    assert 0 < accepted < drafted and max(result.cycles[0].num_accepted for result in results) == 2


@pytest.mark.parametrize("draw", ["top-k", "sample"])
def test_sampling_with_real_models_and_ids_without_a_token(draw):
    """Rows without a token and the image placeholder are never drafted and never emitted, on random targets too."""
    accepted = drafted = loud = 0
    proposed: set[int] = set()

    class Watched(Static):
        def grow(self, *args, **kwargs):
            tree = super().grow(*args, **kwargs)
            proposed.update(tree.tokens.tolist())
            return tree

    for seed in range(3):
        big, small = llava(seed), llava(seed, layers=1)
        # A loud score for every id that must not come.
        for model in (big, small):
            model.lm_head.weight.data[TOKENS:] *= 50
            model.lm_head.weight.data[IMAGE_ID] *= 50
        generator = torch.Generator().manual_seed(seed)
        decoding = Decoding(Watched(BUSH), Sampling(), Draw(draw, generator), Warp(1.0), 40, (EOS,))
        for images in (0, 1):
            result = generate(target(big), proposal(small), request(seed, images), decoding, generator)
            assert all(token < TOKENS and token != IMAGE_ID for token in result.tokens)
            # Guards this test: without the mask the same models put nearly everything on these ids.
            with torch.no_grad():
                asked = request(seed, images)
                free = big(input_ids=asked.ids[None], pixel_values=asked.pixels).logits[0, -1].softmax(-1)
            loud += float(free[IMAGE_ID] + free[TOKENS:].sum()) > 0.9
            accepted += sum(c.num_accepted for c in result.cycles)
            drafted += sum(c.num_drafted for c in result.cycles)
    assert 0 < accepted < drafted
    assert len(proposed) > 20 and max(proposed) < TOKENS and IMAGE_ID not in proposed
    assert loud >= 3


def test_greedy_is_sampling_at_a_temperature_near_zero(big):
    small, warm = llava(1, width=16, layers=1), greedy(Chain(3), 20, (EOS,))
    cold = Decoding(Chain(3), Sampling(), Draw("sample"), Warp(1e-4), 20, (EOS,))
    for seed in range(3):
        expected = generate(target(big), None, request(seed, 1), warm).tokens
        result = generate(target(big), proposal(small), request(seed, 1), cold, torch.Generator().manual_seed(0))
        assert result.tokens == expected
