"""Greedy and sampling acceptance against recorded outcomes of EAGLE-1, EAGLE-2 and LANTERN's exact rule.

The vectors hold random trees, scores and scripted uniforms, and what the published code made of them; no decision in
them is close enough to its threshold for rounding to matter (`min_gap`). Node 0 is the root, as row 0 of p is.
`next_probs` is what the token after the path is drawn from.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.eval import rules
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.tree import Tree
from draftsmith.models.decoding.warp import Warp

VECTORS = Path(__file__).parent / "vectors" / "verify.npz"


def cases(prefix: str) -> list[str]:
    with np.load(VECTORS) as file:
        names = {key.split("/")[0] for key in file.files}
    return sorted((n for n in names if n.startswith(prefix)), key=lambda n: (len(n), n))


@pytest.fixture(scope="module")
def vectors():
    with np.load(VECTORS) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def recorded_tree(vectors, case: str) -> Tree:
    """Siblings stand in draw order; inner nodes have a row of draft_probs where children were drawn."""
    parents = vectors[f"{case}/parent"][1:].tolist()
    tokens = vectors[f"{case}/tokens"][1:]
    expansions = (-1,) * len(parents)
    above = tuple(parent - 1 for parent in parents)
    if f"{case}/draft_probs" not in vectors:
        return Tree(tokens, above, expansions)
    ranks = vectors[f"{case}/child_rank"][1:].tolist()
    assert all(ranks[n] == sum(p == parents[n] for p in parents[:n]) for n in range(len(parents)))
    return Tree(tokens, above, expansions, vectors[f"{case}/draft_probs"], tuple(parents))


def tried_in_turn(tree: Tree, p) -> Tree:
    """A deterministic tree as one drawn from a q that gives its children nothing."""
    return replace(tree, draft_probs=torch.zeros_like(p[:1]), parent_rows=(0,) * tree.num_nodes)


def walk(rule, monkeypatch, tree, p, uniforms):
    """(verified, uniforms used before the bonus, what the bonus was drawn from)."""
    drawn_from = []
    monkeypatch.setattr(rules, "inverse_cdf", lambda probs, uniform: drawn_from.append(probs) or 0)
    taken = []
    verified = rule(tree, p, (taken.append(u) or u for u in [*uniforms.tolist(), 0.5]))
    return verified, len(taken) - 1, drawn_from[0]


def check_walk(vectors, case, outcome, trial, found, tree):
    """A walk against the arrays under `outcome` (the case's own, or those of a setting below it)."""
    verified, used, rest = found
    wanted = {k: vectors[f"{outcome}/{k}"][trial] for k in ("used", "accept_length", "next_probs", "from_residual")}
    nodes = [0, *(n + 1 for n in verified.path)]
    assert used == int(wanted["used"])
    assert verified.num_accepted == int(wanted["accept_length"])
    if f"{outcome}/best_row" in vectors:
        row = vectors[f"{case}/retrieve"][int(vectors[f"{outcome}/best_row"][trial])]
        assert nodes == row[: len(nodes)].tolist()
    if f"{outcome}/accepted_node" in vectors:
        assert nodes[-1] == int(vectors[f"{outcome}/accepted_node"][trial])
    assert verified.tokens == tuple(vectors[f"{case}/tokens"][nodes[1:]].tolist())
    assert ((rest - wanted["next_probs"]).abs() < 1e-5).all()
    assert bool(tree.children.get(nodes[-1] - 1)) == bool(wanted["from_residual"])


@pytest.mark.parametrize("case", cases("greedy"))
def test_greedy(vectors, case):
    verified = Greedy()(recorded_tree(vectors, case), vectors[f"{case}/node_logits"])
    assert [0, *(n + 1 for n in verified.path)] == vectors[f"{case}/path_nodes"].tolist()
    assert verified.num_accepted == int(vectors[f"{case}/accept_length"])
    assert verified.bonus == int(vectors[f"{case}/bonus_token"])
    row = vectors[f"{case}/retrieve"][int(vectors[f"{case}/best_row"])]
    assert [0, *(n + 1 for n in verified.path)] == row[: verified.num_accepted + 1].tolist()


@pytest.mark.parametrize("case", cases("eagle"))
def test_sampling(vectors, case, monkeypatch):
    """eagle2: deterministic dynamic trees. eagle1, eagle1p: static trees with children drawn without replacement.

    EAGLE-2 tries deterministic children in turn, as we try those that a q gives nothing. Without a q we draw once from
    p at each node: test_exactness shows that both give the same distribution.
    """
    tree, p = recorded_tree(vectors, case), vectors[f"{case}/node_probs"]
    if tree.draft_probs is None:
        tree = tried_in_turn(tree, p)
    uniforms = vectors[f"{case}/uniforms"]
    assert vectors[f"{case}/min_gap"].min() > 1e-5
    for trial in range(len(uniforms)):
        result = walk(Sampling(), monkeypatch, tree, p, uniforms[trial])
        check_walk(vectors, case, case, trial, result, tree)


def settings(vectors, case: str) -> Warp:
    temperature, top_k, top_p = (vectors[f"{case}/{name}"] for name in ("temperature", "top_k", "top_p"))
    return Warp(float(temperature), int(top_k), float(top_p))


@pytest.mark.parametrize("case", cases("eagle"))
def test_warping_where_the_order_of_the_cuts_does_not_matter(vectors, case):
    """EAGLE cuts by nucleus and then by top-k, we by top-k first, as plain decoding of these targets does."""
    warp = settings(vectors, case)
    if warp.top_k and warp.top_p < 1:
        assert case in {"eagle2_4", "eagle2_5", "eagle2_10", "eagle2_11"}
        nucleus = Warp(warp.temperature, 0, warp.top_p)(vectors[f"{case}/node_logits"])
        result = Warp(1.0, warp.top_k).truncate(nucleus)
    else:
        result = warp(vectors[f"{case}/node_logits"])
    assert torch.allclose(result, vectors[f"{case}/node_probs"], atol=1e-6)


def test_warping_in_llamagens_order():
    """Temperature, top-k with its ties, then the nucleus with the token that passes it: LlamaGen's sampler as it is."""
    with np.load(VECTORS.with_name("warp.npz")) as file:
        given = {key: torch.from_numpy(file[key]) for key in file.files}
    logits = given["logits"]
    tied = logits[0].sort(descending=True).values
    cuts = list(zip(*(given[name].tolist() for name in ("temperature", "top_k", "top_p")), strict=True))
    assert any(k > 0 and tied[k - 1] == tied[k] for _, k, _ in cuts), "a tie at the edge of a cut"
    for setting, wanted in zip(cuts, given["probs"], strict=True):
        torch.testing.assert_close(Warp(*setting)(logits), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", cases("eagle1"))
def test_recorded_draft_probs_are_what_the_siblings_were_drawn_from(vectors, case):
    check_conditional(vectors, case)


def check_conditional(vectors, case: str) -> None:
    """q of a child given the earlier draws, which `Sampling` takes off one by one, as EAGLE-1 stores it."""
    tree, stored = recorded_tree(vectors, case), vectors[f"{case}/q_conditional"]
    for siblings in tree.children.values():
        q = tree.draft_probs[tree.parent_rows[siblings[0]]]
        for child in siblings:
            assert float(q[tree.tokens[child]]) == pytest.approx(float(stored[child + 1]), abs=1e-5)
            q = rules.without(q, int(tree.tokens[child]))


@pytest.mark.parametrize("case", cases("eagle1"))
def test_recorded_children_are_draws_from_the_warped_draft(vectors, case):
    """Inner nodes: their distribution comes of their scores, their children of the ten draws, in order."""
    check_draws(vectors, case, settings(vectors, case))


def check_draws(vectors, case: str, warp: Warp) -> None:
    tree, draws = recorded_tree(vectors, case), vectors[f"{case}/draws"]
    inner = torch.tensor(sorted(node + 1 for node in tree.children))
    scores, probs = vectors[f"{case}/draft_logits"][inner], vectors[f"{case}/draft_probs"][inner]
    torch.testing.assert_close(warp(scores), probs, atol=1e-6, rtol=0)
    assert sorted(inner.tolist()) == [n for n, row in enumerate(draws.tolist()) if row[0] >= 0]
    for parent, children in tree.children.items():
        assert tree.tokens[list(children)].tolist() == draws[parent + 1, : len(children)].tolist()
