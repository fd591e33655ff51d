"""Tree policies: EAGLE-2's trees and the published static ones array by array, ADT-Tree's steps, and exactness.

The vectors are described in vectors_trees/README.md.
"""

import copy
import itertools
import math
import random
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import (
    CHOICES,
    Adt,
    AdtTree,
    Draw,
    Dynamic,
    Product,
    Static,
    TreeConfig,
    check_combination,
)
from draftsmith.eval.policies.adt import Shape, acceptance_rate, adapt, flock
from draftsmith.eval.policies.dynamic import candidates
from draftsmith.eval.rules import Sampling
from draftsmith.models.decoding.tree import ROOT, ancestor_mask
from draftsmith.models.decoding.warp import Warp
from exact import Expands, prefixes, told
from fails import fails_with
from fakes import Wrapped
from pydantic import TypeAdapter, ValidationError
from test_contract import greedy, not_vacuous
from test_exactness import NoResidual, outcomes
from tiny import next_scores, proposal, request, target
from trees_recorded import leaf_paths, unpadded

VECTORS = Path(__file__).parent / "vectors_trees"
TOP_K = Draw("top-k")


def arrays(name, case):
    stored, prefix = np.load(VECTORS / f"{name}.npz"), f"{case}/"
    return {key.removeprefix(prefix): torch.from_numpy(stored[key]) for key in stored.files if key.startswith(prefix)}


class Recorded:
    """Stands for a drafter: answers each expansion with its rows and remembers what was asked."""

    def __init__(self, levels):
        self.levels, self.tokens, self.parents = levels, [], []

    def __call__(self, parents, tokens):
        self.parents.append(list(parents))
        self.tokens.append(tokens.tolist())
        return self.levels[len(self.tokens) - 1][: len(tokens)]


@pytest.mark.parametrize("case", range(7))
def test_the_tree_of_eagle(case):
    wanted = arrays("eagle_tree", f"tree{case}")
    width, depth, count = (int(wanted[f"cfg/{key}"]) for key in ("top_k", "depth", "n_draft"))
    root, rows = wanted["logp_first"].exp(), wanted["logp_expand"].exp()
    expand = Recorded(rows)
    result = candidates(root, expand, width=width, levels=depth + 1)
    assert result.tokens.tolist() == wanted["candidate_tokens"].tolist()
    levels = depth + 1
    assert len(result.tokens) == width**2 * (levels - 1) + width, "ADT-Tree, equation 5"
    assert torch.allclose(torch.tensor(result.scores).float().log(), wanted["candidate_scores"], atol=1e-4)
    # The beam in rank order, its parents as expansions: rank r of the beam before the last expansion is expansion (i -
    # 1) K + r.
    assert expand.tokens == wanted["beam_tokens"][:depth].tolist()
    ranks = wanted["beam_parents"][:depth]
    assert expand.parents == [[ROOT if r < 0 else (i - 1) * width + r for r in row] for i, row in enumerate(ranks)]
    scores = torch.tensor(result.scores[result.expanded]).float().log().view(depth, width)
    assert torch.allclose(scores, wanted["beam_scores"][:depth], atol=1e-4)
    tree = Dynamic(count + 1, depth, width).grow(root, Recorded(rows), TOP_K, max_levels=99)
    for grown in (tree, result.best(count)):
        assert grown.tokens.tolist() == wanted["draft_tokens"][1:].tolist()
        assert torch.equal(grown.ancestor_mask(), wanted["tree_mask"].bool())
        assert [0, *grown.depths] == wanted["position_offsets"].tolist()
        assert leaf_paths(grown) == unpadded(wanted["retrieve_greedy"])
        padding_last = sorted(leaf_paths(grown), key=lambda path: (*path, math.inf))
        assert padding_last == unpadded(wanted["retrieve_sampling"])


def test_the_tree_of_jacobis_window():
    """Siblings where the window begins, one node a level behind them, and as many nodes as EAGLE's default."""
    tree = Static(CHOICES["window_25"])
    assert tree.num_nodes == Static(CHOICES["mc_sim_7b_63"]).num_nodes and tree.num_levels == 22
    assert [len(path) for path in tree.choices] == [1] * 4 + [*range(2, 23)]
    assert {max(path[1:], default=0) for path in tree.choices} == {0}


@pytest.mark.parametrize("name", [*(name for name in CHOICES if name != "window_25"), "random_shuffled"])
def test_the_published_static_trees(name):
    wanted = arrays("static_tree", name)
    listed = unpadded(wanted["choices"])
    assert name == "random_shuffled" or sorted(listed) == sorted(CHOICES[name])
    policy, asked, expansions = Static(listed), [], []

    def q(first, count):
        """Row r's j-th likeliest token is 10 r + j: a token says which draw of which inner node it is."""
        rows = torch.zeros(count, 10 * len(listed))
        for row in range(count):
            start = 10 * (first + row)
            rows[row, start : start + 10] = torch.arange(10, 0, -1) / 55
        return rows

    def expand(parents, tokens):
        first = 1 + sum(len(parents) for parents in asked)
        asked.append(list(parents))
        expansions.append((parents, tokens))
        return q(first, len(parents))

    tree = policy.grow(q(0, 1)[0], expand, TOP_K, max_levels=99)
    assert [-1, *(parent + 1 for parent in tree.parents)] == wanted["parent"].tolist()
    assert torch.equal(tree.ancestor_mask(), wanted["tree_mask"].bool())
    assert [0, *tree.depths] == wanted["position_offsets"].tolist()
    assert [tree.depths.count(level) for level in range(tree.num_levels + 1)] == wanted["level_sizes"].tolist()
    assert leaf_paths(tree) == unpadded(wanted["retrieve"]), "in this order relaxed greedy acceptance breaks ties"
    assert (tree.tokens + 1).tolist() == wanted["tree_indices"][1:].tolist()
    assert policy.max_nodes == len(listed)
    check_expansions(wanted, expansions)
    check_table(wanted, tree)


def test_a_static_tree_of_more_children_than_ids_is_told():
    with pytest.raises(UserError, match="a node of the static tree has 3 children, and the drafter 2 ids"):
        Static([(0,), (1,), (2,)]).grow(torch.tensor([0.5, 0.5]), None, TOP_K, max_levels=1)


def check_expansions(wanted, expansions):
    """What the drafter is asked for at each level: whose tokens, under whom, and which expanded nodes each one sees."""
    assert len(expansions) == sum(key.endswith("/select") for key in wanted)
    seen = ancestor_mask(tuple(parent for parents, _ in expansions for parent in parents))[1:, 1:]
    above, first = 0, 0  # inner nodes in front of the level that was expanded last, and of this one
    for level, (parents, tokens) in enumerate(expansions):
        # Draws of the level before, ten to an inner node: a token is 10 * (row of its parent, the root's first) + rank.
        before = 0 if level == 0 else 1 + above
        assert (tokens - 10 * before).tolist() == wanted[f"expand{level}/select"].tolist()
        assert [*Counter(parents).values()] == wanted[f"expand{level}/repeat"].tolist()
        mask = seen[first : first + len(parents), : first + len(parents)]
        assert torch.equal(mask, wanted[f"expand{level}/mask"].bool())
        above, first = first, first + len(parents)


def check_table(wanted, tree):
    """For each entry of the table of paths: its parent among the inner nodes of that level, and who came before."""
    inner = [node for node in (ROOT, *range(tree.num_nodes)) if tree.children.get(node)]
    depth = {ROOT: 0} | dict(enumerate(tree.depths))
    rows = {node: [other for other in inner if depth[other] == depth[node]].index(node) for node in inner}
    for row, path in enumerate(leaf_paths(tree)):
        assert wanted["parent_row"][row, 0] == -1
        for place, node in enumerate(path[1:], 1):
            parent = tree.parents[node - 1]
            assert rows[parent] == wanted["parent_row"][row, place]
            older = [child + 1 for child in tree.children[parent] if child + 1 < node]
            assert older == [n for n in wanted["earlier_siblings"][row, place].tolist() if n >= 0]


def table(seed, vocab, kept):
    """q and p after a prefix (they depend on its last two tokens), with zeros as top-k leaves them."""
    generator = torch.Generator().manual_seed(seed)

    def one(most):
        values = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 2
        values[torch.randperm(vocab, generator=generator)[most:]] = 0
        return values / values.sum()

    ends = [e for length in range(3) for e in itertools.product(range(vocab), repeat=length)]
    p, q = {e: one(vocab - 1) for e in ends}, {e: one(kept) for e in ends}
    return (lambda prefix: p[tuple(prefix[-2:])]), (lambda prefix: q[tuple(prefix[-2:])])


def grown(policy, q, prefix, max_levels=99):
    """The policy's tree after a prefix, and each row's prefix (the root's first)."""
    expand = Expands(q, prefix)
    tree = policy.grow(q(prefix), expand, TOP_K, max_levels=max_levels)
    rows, expansions = prefixes(tree, prefix), expand.paths
    # A node's expansion is its expansion; a node without one was never expanded.
    assert list(tree.expansions) == [expansions.index(row) if row in expansions else ROOT for row in rows[1:]]
    assert all(q(path[:-1])[path[-1]] > 0 for path in expansions), "nothing impossible is expanded"
    assert len(expansions) <= policy.max_nodes and tree.num_nodes <= policy.max_nodes
    assert tree.num_levels <= min(policy.num_levels, max_levels)
    return tree, rows


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_what_q_gives_nothing_is_never_drafted(kept):
    """Sure children score as their parents do: the parents must be in the tree all the same."""
    for seed in range(20):
        _, q = table(seed, 5, kept)
        tree, rows = grown(Dynamic(total=9, depth=3, width=4), q, (0,))
        assert all(q(row[:-1])[row[-1]] > 0 for row in rows[1:])
        assert tree.num_nodes == (4 if kept == 1 else 8)
        assert all(len({int(tree.tokens[c]) for c in kids}) == len(kids) for kids in tree.children.values())
        for parent, kids in tree.children.items():
            chances = [float(q(rows[parent + 1])[tree.tokens[c]]) for c in kids]
            assert chances == sorted(chances, reverse=True)


def test_a_sure_token_rounded_above_one():
    sure = torch.tensor([0.0, 1 + 2**-20, 0.0])
    tree, _ = grown(Dynamic(3, 5, 2), lambda prefix: sure, ())
    assert tree.tokens.tolist() == [1, 1] and tree.is_chain


def test_a_tree_is_clamped():
    _, q = table(0, 5, 5)
    assert grown(Dynamic(60, 1, 3), q, ())[0].num_nodes == 3 + 9
    assert grown(Dynamic(60, 0, 30), q, ())[0].num_nodes == 5, "the vocabulary"
    for levels in (1, 2, 3):
        assert grown(Dynamic(60, 4, 3), q, (), max_levels=levels)[0].num_levels == levels


def test_a_width_beyond_the_nodes_draws_the_same_tree():
    clamped, wider = Dynamic(5, 3, 6), Dynamic(5, 3, 6)
    assert clamped.width == 4
    wider.width, wider.max_nodes = 6, 18
    for seed in range(20):
        _, q = table(seed, 6, 6)
        trees = [grown(policy, q, ())[0] for policy in (clamped, wider)]
        assert trees[0].parents == trees[1].parents
        assert torch.equal(trees[0].tokens, trees[1].tokens)


@pytest.mark.parametrize("ends", [frozenset(), frozenset({1, 3})])
def test_the_product_tree_holds_the_likeliest_paths(ends):
    """Of all paths through the levels' best tokens, by their probabilities; nothing stands below an end token."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        levels = (4 * torch.randn(3, 6, generator=generator, dtype=torch.float64)).softmax(-1)
        by_level = iter(levels[1:])
        draw = Draw("top-k", ends=ends)
        tree = Product(9, 3, 4).grow(levels[0], lambda *_, by=by_level: next(by)[None], draw, max_levels=5)
        best = [level.topk(4).indices.tolist() for level in levels]
        paths = [path for length in (1, 2, 3) for path in itertools.product(*best[:length]) if not {*path[:-1]} & ends]
        chances = sorted((math.prod(float(levels[i, t]) for i, t in enumerate(path)) for path in paths), reverse=True)
        found = []
        for node in range(tree.num_nodes):
            path = []
            while node != ROOT:
                path.insert(0, int(tree.tokens[node]))
                node = tree.parents[node]
            assert tuple(path) in paths
            found.append(math.prod(float(levels[i, t]) for i, t in enumerate(path)))
        assert found == pytest.approx(chances[:8]), "the best eight, likeliest first"
        assert tree.planned == 3


def settings(**given):
    small = {"total": 6, "initial_depth": 1, "initial_width": 2}
    return AdtTree(kind="adt", **(small | {"width_step": 1, "width_range": (1, 4), "depth_range": (0, 4)} | given))


STARTS = ["horizontal", "vertical", "random", "token-flock"]


def adt(**given):
    return Adt(settings(**given), grid=2)


def continuation(policy, rule, p, q, length, shapes, max_levels=99, trees=None):
    """Distribution of the next `length` tokens over as many cycles as they take, by enumeration.

    Args:
        trees: every (policy that grew it, tree, its rows' prefixes) of a policy after a prefix, with its chance; None:
            the one of the likeliest tokens.
    """
    result = defaultdict(float)
    trees = trees or (lambda policy, prefix: [((policy, *grown(policy, q, prefix, max_levels)), 1.0)])

    def go(policy, prefix, weight):
        if len(prefix) > length:
            result[prefix[1 : length + 1]] += weight
            return
        for (grew, tree, rows), drawn in trees(policy, prefix):
            shapes.add(tree.parents)
            for tokens, chance in outcomes(rule, tree, torch.stack([p(row) for row in rows])):
                after = copy.deepcopy(grew)
                after.observe(told(tree, tokens[:-1]))
                go(after, (*prefix, *tokens), weight * drawn * chance)

    policy.start()
    go(policy, (0,), 1.0)
    assert sum(result.values()) == pytest.approx(1, abs=1e-9)
    return result


def off_target(found, p, vocab, length):
    """Total variation between what came out and the target's own continuations."""
    off = 0.0
    for tokens in itertools.product(range(vocab), repeat=length):
        before = [(0, *tokens[:i]) for i in range(length)]
        off += abs(found.get(tokens, 0.0) - math.prod(float(p(b)[t]) for b, t in zip(before, tokens, strict=True)))
    return off / 2


@pytest.mark.parametrize(
    "policy", [Dynamic(5, 2, 2), Product(5, 3, 2), *(adt(start_from=s) for s in STARTS)],
    ids=["dynamic", "product", *STARTS],
)  # fmt: skip
def test_enumerated(policy):
    for seed, kept in ((0, 3), (1, 2)):
        (p, q), shapes = table(seed, 3, kept), set()
        assert off_target(continuation(policy, Sampling(), p, q, 3, shapes), p, 3, 3) < 1e-9
        assert len(shapes) > 1, "the tree's shape changes with what was drafted and accepted"
        assert off_target(continuation(policy, NoResidual(), p, q, 3, set()), p, 3, 3) > 0.01


class Checked(Wrapped):
    """Every distribution is that of a fresh pass over its prefix: the expansions that the policy names are right."""

    def __init__(self, model):
        super().__init__(model)
        self.model, self.checked = model, 0

    def start(self, request, prefill, warp, *, capacity):
        super().start(request, prefill, warp, capacity=capacity)
        self.request, self.warp = request, warp

    def begin(self, first):
        super().begin(first)
        self.committed = (first,)

    def fresh(self, tokens):
        return next_scores(self.model, self.request, tokens)

    def check(self, q, tokens):
        assert torch.allclose(q, self.warp.apply_temperature(self.fresh(tokens)), atol=1e-4)
        self.checked += 1

    def root(self):
        self.paths = []
        q = super().root()
        self.check(q, self.committed)
        return q

    def expand(self, parents, tokens):
        above = [self.paths[i] if i != ROOT else self.committed for i in parents]
        new = [(*a, t) for a, t in zip(above, tokens.tolist(), strict=True)]
        self.paths += new
        rows = super().expand(parents, tokens)
        for q, path in zip(rows, new, strict=True):
            self.check(q, path)
        return rows

    def accept(self, verified):
        super().accept(verified)
        self.committed = (*self.committed, *verified.tokens, verified.bonus)


@pytest.mark.parametrize(
    "policy",
    [Dynamic(8, 2, 3), Dynamic(6, 4, 9), Product(8, 5, 3), adt(), adt(start_from="vertical")],
    ids=lambda p: p.name,
)
@torch.inference_mode()
def test_the_drafter_keeps_what_was_accepted(big, near, policy):
    drafter = Checked(near)
    not_vacuous(generate(target(big), drafter, request(0, 1), greedy(policy, 16)).cycles)
    assert drafter.checked > 25


def test_sampling_through_the_loop_repeats(big, near):
    policy = adt()
    decoding = Decoding(policy, Sampling(), TOP_K, Warp(1.0, top_k=3), 24, ())
    results, logs = [], []
    for _ in range(2):
        results.append(generate(target(big), proposal(near), request(0, 1), decoding, torch.Generator().manual_seed(5)))
        logs.append(policy.log)
    assert results[0].tokens == results[1].tokens
    assert logs[0] == logs[1]
    drafted = [c for c in results[0].cycles if c.num_nodes]
    assert [c.accepted for c in logs[0]] == [c.num_accepted for c in drafted]
    assert len({c.depth for c in logs[0]}) > 1


# --- ADT-Tree's rules ---


FLAT = torch.ones(50) / 50


def flat_levels(parents, tokens):
    return FLAT.expand(len(parents), -1)


def run(policy, accepted):
    """(d, k) of each cycle of one image, for given accepted counts."""
    policy.start()
    for count in accepted:
        policy.grow(FLAT, flat_levels, TOP_K, max_levels=1)
        policy.observe(SimpleNamespace(num_accepted=count))
    return [(c.depth, c.width) for c in policy.log]


def test_steps_and_bounds():
    anole, llamagen = (AdtTree(kind="adt", preset=name) for name in ("anole", "llamagen"))
    assert adapt(anole, Shape(4, 10), positive=True) == (5, 7)
    assert adapt(anole, Shape(4, 10), positive=False) == (3, 13)
    assert adapt(anole, Shape(9, 4), positive=True) == (9, 4)
    assert adapt(anole, Shape(4, 13), positive=False) == (3, 13)
    # Width is free where the new depth is not above 1, and bounded again once it is.
    assert adapt(anole, Shape(2, 13), positive=False) == (1, 16)
    assert adapt(anole, Shape(1, 16), positive=False) == (1, 19)
    assert adapt(anole, Shape(1, 40), positive=True) == (2, 13)
    always = anole.model_copy(update={"bound_width": "always"})
    assert adapt(always, Shape(1, 13), positive=False) == (1, 13)
    assert adapt(llamagen, Shape(4, 10), positive=False) == (3, 20)
    assert adapt(llamagen, Shape(3, 35), positive=False) == (2, 39)
    # Steps of 3 from 10 stay on 4, 7, 10 and 13.
    widths = {width for depth, width in run(Adt(anole, grid=8), [0, 9, 0, 9, 9, 9, 0, 0, 9, 9]) if depth > 1}
    assert widths <= {4, 7, 10, 13} and len(widths) > 2


def test_running_state():
    anole = AdtTree(kind="adt", preset="anole")
    accepted = [4, 5, 2, 0]
    assert run(Adt(anole, grid=8), accepted) == [(4, 10), (5, 7), (6, 4), (5, 7)]
    policy = Adt(anole, grid=8)
    assert run(policy, accepted) == run(policy, accepted), "each image starts afresh"
    # Free widths end where more would draw the same tree.
    assert run(Adt(anole, grid=8), [0] * 40)[-1] == (1, 59)


def test_what_counts_as_accepted():
    by = {name: settings(acceptance=name) for name in ("accepted/depth", "accepted/levels", "emitted/levels")}
    assert [acceptance_rate(s, 3, 3) for s in by.values()] == [1, 3 / 4, 1]
    assert [acceptance_rate(s, 3, 4) for s in by.values()] == [4 / 3, 1, 5 / 4]
    assert [acceptance_rate(s, 3, 0) for s in by.values()] == [0, 0, 1 / 4]


def test_the_papers_alpha_steers_as_the_default_does():
    """Section III-B: alpha = tau / d. Against the paper's beta of 1 both say the same of every tree."""
    literal, ours = settings(acceptance="emitted/levels"), settings()
    trees = [(depth, accepted) for depth in range(1, 10) for accepted in range(depth + 2)]
    rates = [(acceptance_rate(literal, *tree), acceptance_rate(ours, *tree)) for tree in trees]
    assert all((a >= 1) == (b >= 1) for a, b in rates)
    assert any((a >= 0.5) != (b >= 0.5) for a, b in rates)
    without_bonus = settings(acceptance="accepted/levels")
    assert [t for t, (a, _) in zip(trees, rates, strict=True) if (acceptance_rate(without_bonus, *t) >= 1) != (a >= 1)]


def test_the_planned_depth_is_the_papers_d():
    """Tables I and II: exactly 5.00 for EAGLE-2 with depth 4, however many levels are left after reranking."""
    for policy in (Dynamic(60, 4, 10), Adt(AdtTree(kind="adt", preset="anole"), grid=8)):
        for most, levels in ((99, 2), (1, 1)):
            tree = policy.grow(FLAT, flat_levels, TOP_K, max_levels=most)
            assert (tree.planned, tree.num_levels) == (5, levels)


@pytest.mark.parametrize(
    ("acceptance", "levels"), [("accepted/depth", 2.09), ("emitted/levels", 2.09), ("accepted/levels", 2.01)]
)
def test_the_reading_that_gives_the_papers_depth(acceptance, levels):
    """Table I, temperature 1: tau 1.10 and (planned) mean depth 2.09, where one draft in ten is accepted."""
    anole = AdtTree(kind="adt", preset="anole", acceptance=acceptance)
    generator, shape, depths = random.Random(0), Shape(4, 10), []
    for _ in range(50_000):
        accepted = 0
        while accepted <= shape.depth and generator.random() < 0.1 / 1.1:
            accepted += 1
        depths.append(shape.depth + 1)
        shape = adapt(anole, shape, positive=acceptance_rate(anole, shape.depth, accepted) >= anole.threshold)
    assert sum(depths) / len(depths) == pytest.approx(levels, abs=0.02)


def test_starting_points():
    grid = 4
    make = lambda **given: Adt(AdtTree(kind="adt", preset="anole", **given), grid=grid)  # noqa: E731
    # One token a cycle: the trees are those of cells 1, 2, 3, and 4, which begins a row.
    again = run(make(row_start="initial"), [0, 0, 0, 0, 0])
    assert again == [(4, 10), (3, 13), (2, 13), (3, 13), (2, 13)]
    assert run(make(), [0, 0, 0, 0, 0]) == [(4, 10), (3, 13), (2, 13), (1, 16), (1, 19)]
    above = run(make(start_from="vertical"), [0, 0, 0, 0, 0, 0])
    # Cell 4 has the first cell above, which no tree made; cell 5 has that of the first tree, (4, 10).
    assert above == [(4, 10), (3, 13), (2, 13), (1, 16), (3, 13), (2, 13)]
    fixed = make(fixed_depth=1, fixed_width=12)
    assert run(fixed, [0, 1, 0]) == [(1, 12), (1, 15), (2, 9)]
    chance = make(start_from="random")
    first, second = run(chance, [0] * 30), run(chance, [0] * 30)
    assert first == second
    assert len(set(first)) > 10
    other = Adt(chance.settings, grid=grid, seed=1)
    assert run(other, [0] * 30) != first


def test_token_flock_against_the_formula():
    generator = random.Random(0)
    grid, radius = 5, 2.3
    for count in range(1, 23):
        cells = [Shape(generator.randint(1, 9), generator.randint(4, 13)) if n else None for n in range(count)]
        row, column = divmod(count, grid)
        near_by = [
            (shape, (radius - (row - n // grid) + 1) / radius)
            for n, shape in enumerate(cells)
            if shape and math.dist((row, column), divmod(n, grid)) <= radius
        ]
        result = flock(cells, grid, radius)
        if not near_by:
            assert result is None
            continue
        total = sum(weight for _, weight in near_by)
        means = [sum(w / total * shape[i] for shape, w in near_by) for i in (0, 1)]
        assert result == tuple(math.floor(mean + 0.5) for mean in means)
    assert flock([None], grid, radius) is None


def test_tokens_that_no_tree_made():
    """The last place of an image needs no draft: it is counted and not logged."""
    policy = adt()
    run(policy, [0])
    policy.observe(SimpleNamespace(num_accepted=0))
    assert len(policy.log) == 1
    assert policy._cells == [None, policy.log[0][:2], None]


# --- Recipes ---


def tree(**given):
    return TypeAdapter(TreeConfig).validate_python(given)


def test_sections_build_policies():
    assert tree(kind="chain", gamma=3).build().max_nodes == 3
    assert tree(kind="static", choices="naive_extend_57").build(grid=4, seed=1).max_nodes == 57
    assert tree(kind="static", choices=[[0], [1], [0, 0]]).build().num_levels == 2
    dynamic = tree(kind="dynamic").build()
    assert (dynamic.num_nodes, dynamic.num_levels, dynamic.width, dynamic.max_nodes) == (59, 5, 10, 59)
    assert tree(kind="dynamic", depth=7).build().max_nodes == 70, "the drafter's slots need room too"
    product = tree(kind="product", levels=4).build()
    assert (product.num_nodes, product.num_levels, product.width, product.max_nodes) == (59, 4, 10, 59)
    assert tree(kind="product", total=3, levels=7).build().max_nodes == 7, "a drafter's expansions need room too"
    anole = tree(kind="adt", preset="anole")
    assert (anole.width_step, anole.width_range, anole.depth_range) == (3, (3, 14), (0, 10))
    assert anole.build(grid=32).max_nodes == 9 * 13
    llamagen = tree(kind="adt", preset="llamagen", total=40, width_range=(3, 30))
    assert (llamagen.width_step, llamagen.width_range) == (10, (3, 30))
    assert settings(depth_range=(0, 2)).depth_range == (0, 2), "depth 1 is left"
    assert tree(**llamagen.model_dump()) == llamagen


@pytest.mark.parametrize(("given", "message"), [
    ({"kind": "static", "choices": "mc_sim_7b"}, "did you mean 'mc_sim_7b_63'"),
    ({"kind": "dynamic", "top_k": 3}, "top_k"),
    ({"kind": "dynamic", "total": 1}, "total"),
    ({"kind": "adt"}, "width_step"),
    ({"kind": "adt", "preset": "emu"}, "preset"),
    ({"kind": "adt", "preset": "anole", "fixed_width": 25}, "outside width_range"),
    ({"kind": "adt", "preset": "anole", "depth_range": [3, 4]}, "allows nothing"),
    *(({"kind": "static", "choices": choices}, "choices are empty") for choices in ([], [[0], [0]], [[]])),
    ({"kind": "static", "choices": [[0], [1, 0]]}, "no parent"),
])  # fmt: skip
def test_bad_sections(given, message):
    with pytest.raises((ValidationError, UserError), match=message):
        tree(**given)


def test_bad_combinations():
    fails_with("no grid", tree(kind="adt", preset="anole").build)
    check = lambda **given: check_combination(**({"prunes_by_token": False} | given))  # noqa: E731
    for temperature in (0, 1):
        check(temperature=temperature, draw="top-k", policy="dynamic", prunes_by_token=True, rule="lantern")
    check(temperature=1, draw="sample", policy="static", rule="lantern")
    check(temperature=1, draw="sample", policy="chain", rule="block")
    pruning = {"draw": "sample", "policy": "dynamic", "prunes_by_token": True, "rule": "lantern"}
    for wrong, why in (
        ({"temperature": 1} | pruning, "prunes drawn nodes"),
        ({"temperature": 1, "draw": "top-k", "policy": "chain", "rule": "greedy"}, "greedy at a temperature above 0"),
        ({"temperature": 0, "draw": "top-k", "policy": "chain", "rule": "sampling"}, "sampling at temperature 0"),
        ({"temperature": 0, "draw": "top-k", "policy": "chain", "rule": "block"}, "block at temperature 0"),
        ({"temperature": 1, "draw": "top-k", "policy": "chain", "rule": "block"}, "one sampled chain"),
        ({"temperature": 1, "draw": "sample", "policy": "static", "rule": "block"}, "one sampled chain"),
    ):
        fails_with(why, check, **wrong)


def test_sampled_children_follow_from_the_requests_seed():
    q = torch.full((1, 50), 0.02)
    one, same, other = (
        Draw("sample").seeded(torch.Generator().manual_seed(seed), q.device)(q, 5).tolist() for seed in (1, 1, 2)
    )
    assert one == same != other
