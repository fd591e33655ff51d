"""The planner against SAGE's formulas, against every tree there is, and on trees that were decoded."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Static
from draftsmith.eval.rules import Sampling
from draftsmith.eval.studies.confidence import (
    Reached,
    Watched,
    by_confidence,
    plot_acceptance,
    plot_autocorrelation,
    rates_by_rank,
)
from draftsmith.eval.studies.confidence import entropy_autocorrelation as correlations
from draftsmith.eval.studies.planner import (
    Costs,
    Plan,
    likeliest_paths,
    plan,
)
from draftsmith.models.decoding.warp import Warp
from draftsmith.trainers.evaluate.probes import planned
from rows import a_row, empty_row
from test_end_token import ends_inside, greedy
from tiny import llava, near, proposal, request, self_draft, target

RECORDED = json.loads((Path(__file__).parents[1] / "vectors_sage" / "sage.json").read_text())


def test_expected_length():
    for case in RECORDED["expected_length"]:
        rates = [[case["p"] * case["gamma"] ** level] for level in range(case["depth"])]
        paths = likeliest_paths(rates, 99)
        assert sum(chance for _, chance in paths) == pytest.approx(case["value"], abs=1e-9)


def trees(levels, width, nodes):
    """Every static tree of so many nodes: sets of paths with all parents and elder siblings."""
    paths = [p for n in range(1, levels + 1) for p in itertools.product(range(width), repeat=n)]
    for some in itertools.combinations(paths, nodes):
        known = {(), *some}
        if all(p[:-1] in known and (not p[-1] or (*p[:-1], p[-1] - 1) in known) for p in some):
            yield some


def test_the_papers_cost_of_a_cycle():
    """SAGE, equation 6: S = (E[tau] + 1) / (c_d |T| + c_t); ours has times of levels and of verified nodes, too."""
    paper = Costs(verify_s=1.0, draft_node_s=0.05)
    assert paper.cycle_s(levels=3, nodes=12) == pytest.approx(1.0 + 12 * 0.05)
    assert Costs(1.0, 0.1, 0.05, 0.02).cycle_s(3, 12) == pytest.approx(1.0 + 3 * 0.1 + 12 * 0.07)
    chain = plan([[0.5]], paper, plain_s=1.0, most_nodes=1)
    assert chain.speedup == pytest.approx((0.5 + 1) / (0.05 * 1 + 1))


@pytest.mark.parametrize("draft_s", [0.01, 0.2])
def test_no_tree_is_better(draft_s):
    rates = [[0.6, 0.2], [0.5, 0.3]]
    costs = Costs(verify_s=1.0, draft_s=draft_s, verify_node_s=0.02)
    result = plan(rates, costs, plain_s=1.0, most_nodes=6)
    best = 0.0
    for nodes in range(1, 7):
        for tree in trees(2, 2, nodes):
            accepted = sum(math.prod(rates[n][rank] for n, rank in enumerate(path)) for path in tree)
            depth = max(map(len, tree))
            best = max(best, (accepted + 1) / costs.cycle_s(depth, nodes))
    assert result.speedup == pytest.approx(best)
    assert result.cycle_s == pytest.approx(costs.cycle_s(result.levels, len(result.choices)))
    Static(result.choices)  # the real policy takes it
    assert (result.levels, result.width) == ((2, 2) if draft_s < 0.1 else (result.levels, result.width))


def test_dear_drafts_give_shallow_trees():
    rates = [[0.8, 0.1]] * 8
    depths = [plan(rates, Costs(1.0, draft_s=s), plain_s=1.0).levels for s in (0.01, 0.1, 0.3, 0.9)]
    assert depths == sorted(depths, reverse=True) and depths[0] == 8
    nothing = plan(rates, Costs(1.0, draft_s=2.0), plain_s=1.0)
    assert nothing == Plan((), 0.0, 1.0, 1.0)
    # A chain whose draft costs c_d for each node: equation 6.
    chain = plan([[0.7]] * 20, Costs(1.0, draft_node_s=0.05), plain_s=1.0)
    speedups = [(sum(0.7**n for n in range(1, d + 1)) + 1) / (0.05 * d + 1) for d in range(21)]
    assert chain.levels == speedups.index(max(speedups))


@pytest.fixture(scope="module")
def watched():
    big, policy = llava(0), Watched(Static([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]), top_k=10)
    decoding = Decoding(policy, Sampling(), Draw("top-k"), Warp(1.0), 24, ())
    own, drafter, cycles = target(big), proposal(near(big)), []
    for seed in range(4):
        cycles.append(generate(own, drafter, request(seed, 1), decoding, torch.Generator().manual_seed(seed)).cycles)
    return policy, cycles


def test_what_was_reached(watched):
    policy, cycles = watched
    assert len(policy.requests) == len(cycles) == 4
    for places, result in zip(policy.requests, cycles, strict=True):
        roots = [place for place in places if place.depth == 0]
        drafted = [cycle for cycle in result if cycle.num_nodes]
        assert [place.accepted is not None for place in roots] == [c.num_accepted > 0 for c in drafted]
        assert sum(place.accepted is not None for place in places) == sum(c.num_accepted for c in drafted)
        assert {place.children for place in roots[:-1]} == {3}
        assert all(0 <= place.confidence <= 1 for place in roots)


def test_rates_by_rank(watched):
    places = [place for request_places in watched[0].requests for place in request_places]
    rates = rates_by_rank(places, levels=3, width=3)
    roots = [place for place in places if place.depth == 0 and place.children == 3]
    firsts = [place for place in places if place.depth == 0]
    assert rates[0][0] == pytest.approx(sum(place.accepted == 0 for place in firsts) / len(firsts))
    assert rates[0][2] == pytest.approx(sum(p.accepted == 2 for p in roots) / len(roots))
    assert rates[1][2] is None and rates[2] == [None] * 3, "never offered"


def test_bins_and_lags(tmp_path):
    places = [Reached(0, 2, rank, sure) for sure, rank in ((0.05, None), (0.07, 1), (0.95, 0), (1.0, 0), (0.5, None))]
    places.append(Reached(1, 1, 0, None))
    bins = by_confidence(places)
    assert [(b.places, b.likeliest, b.any) for b in bins] == [(2, 0, 0.5), (1, 0, 0), (2, 1, 1)]
    wave = [[Reached(0, 1, 0, 0.5 + 0.4 * math.cos(math.pi * n)) for n in range(20)] for _ in range(2)]
    lags = correlations(wave)[:3]
    assert [lag.correlation for lag in lags] == pytest.approx([-1, 1, -1])
    assert [lag.pairs for lag in lags] == [38, 36, 34], "pairs of one request each"
    assert correlations([[Reached(0, 1, 0, 0.5)] * 5]) == [], "nothing varies"
    plot_acceptance(tmp_path / "bins.png", {"draft": bins})
    plot_autocorrelation(tmp_path / "lags.png", {"draft": lags})
    assert (tmp_path / "bins.png").stat().st_size > 1000 and (tmp_path / "lags.png").stat().st_size > 1000


NO_CYCLE = empty_row(stop="eos")


def test_nothing_is_planned_of_nothing():
    assert planned([[None, None]], [NO_CYCLE]) is None and planned([[0.5, 0.1]], [a_row()]) is not None
    both = [planned([[0.5, 0.1]], rows) for rows in ([a_row()], [a_row(), NO_CYCLE])]
    assert both[0] == both[1], "requests without a cycle do not pull the times down"


def test_a_place_where_an_end_token_stood_is_no_refusal():
    """Rates of the planner and acceptance by confidence: a copy of the target is never refused."""
    big = llava(0)
    for place in range(1, 6):
        asked = request(1, 1)
        _, eos = ends_inside(big, asked, place)
        policy = Watched(Chain(4))
        generate(target(big), self_draft(big), asked, greedy(policy, 24, (eos,)))
        assert all(reached.accepted == 0 for reached in policy.requests[0])
