"""SAGE: laws and trees by the recorded vectors, exactness of every growth, and what the log says.

The vectors are described in vectors_sage/README.md.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.eval.policies import Draw, Sage, SageTree
from draftsmith.eval.policies.confidence import Drafted, confidence
from draftsmith.eval.policies.history import DepthCap, History
from draftsmith.eval.policies.laws import Laws, LawSettings, grow_nodes
from draftsmith.eval.policies.sage import grow_online, template

VECTORS = Path(__file__).parent / "vectors_sage"
RECORDED = json.loads((VECTORS / "sage.json").read_text())
ARRAYS = np.load(VECTORS / "sage.npz")
NAMES = {
    "best": "best-first",
    "dfs": "depth-first",
    "root1": "root",
    "plain": "plain",
    "round": "nearest",
    "floor": "floor",
}


def laws_of(parameters, alpha, **reading):
    settings = LawSettings(
        top_k=parameters["k"],
        min_depth=parameters["d_min"],
        max_depth=parameters["d_max"],
        min_width=parameters["w_min"],
        max_width=parameters["w_max"],
        max_nodes=parameters["n_max"],
        **reading,
    )
    return Laws.of(settings, alpha, cap=settings.max_depth)


def test_confidence():
    likeliest = torch.from_numpy(ARRAYS["logits"]).softmax(-1).topk(10).values
    for row, _ in enumerate(RECORDED["parameters"]):
        assert confidence(likeliest).numpy() == pytest.approx(ARRAYS["alpha"][row], abs=1e-9)


@pytest.mark.parametrize("number", range(len(RECORDED["cases"])))
def test_laws_and_templates(number):
    case = RECORDED["cases"][number]
    parameters = RECORDED["parameters"][case["parameters"]]
    laws = laws_of(parameters, case["alpha"])
    assert laws.depth == pytest.approx(case["D"], abs=1e-9)
    assert laws.width == pytest.approx(case["W"], abs=1e-9)
    assert laws.levels == case["D_rounded"]
    for level, row in enumerate(case["W_l"], start=1):
        for parent, value in zip((1, 0.5, 0.1, 0.01), row, strict=True):
            assert laws.width_at(level, parent) == pytest.approx(value, abs=1e-9)
    for level, value in enumerate(case["theta_l"], start=1):
        assert laws.threshold_at(level) == pytest.approx(value, abs=1e-9)
    ranked = case["topk_prob"]
    for reading, tree in zip(RECORDED["readings"], case["trees"], strict=True):
        assert not tree["rounding_sensitive"]
        laws = laws_of(
            parameters,
            case["alpha"],
            threshold=reading["threshold"],
            rounding=reading["rounding"],
            order=NAMES[reading["order"]],
            first_level=NAMES[reading["first_level"]],
            depth_rounding=NAMES[reading["depth"]],
        )
        nodes = grow_nodes(laws, ranked, lambda some: [ranked] * len(some), levels=laws.levels)
        paths = sorted((node.path for node in nodes), key=lambda path: (len(path), path))
        assert [list(path) for path in paths] == tree["nodes"]
        static = template(laws, ranked)
        assert static.choices == (paths or [(0,)]), "nothing above the threshold: one likeliest node"


@pytest.mark.parametrize("number", range(len(RECORDED["online"])))
def test_online_growth(number):
    case = RECORDED["online"][number]
    q = torch.from_numpy(ARRAYS["markov_logits"]).softmax(-1)
    laws = laws_of(RECORDED["parameters"][0], case["alpha"], threshold=case["threshold"])
    root, asked = q[case["start_token"]], []

    def expand(parents, tokens):
        asked.extend(tokens.tolist())
        return q[tokens]

    drafted = Drafted(root, 10)
    tree = grow_online(laws, root, expand, drafted, levels=laws.levels)
    assert [list(path) for path in ranks(tree)] == case["nodes"]
    assert tree.tokens.tolist() == case["tokens"]
    # A node's slot is its expansion, and what was expanded was kept.
    assert all(asked[slot] == token for slot, token in zip(tree.slots, case["tokens"], strict=True) if slot >= 0)
    assert len(drafted) == len(asked) + 1
    assert any(slot >= 0 for slot in tree.slots)


def ranks(tree):
    """Each node's ranks from the root down."""
    paths = {-1: ()}
    for node, parent in enumerate(tree.parents):
        paths[node] = (*paths[parent], tree.children[parent].index(node))
    return [paths[node] for node in range(tree.num_nodes)]


def test_the_cap_follows_what_was_accepted():
    given = RECORDED["history"]
    for trace in given["traces"]:
        settings = History(
            window=given["window"], low=given["low"], high=given["high"], max_depth=given["cap_max"],
            full_window=trace["full_window_required"], clear=trace["clear_after_change"],
        )  # fmt: skip
        cap, found, depths = DepthCap(settings, start=given["cap_start"], least=given["d_min"]), [], []
        for accepted in given["accepted_without_bonus"]:
            cap.observe(accepted)
            found.append(cap.value)
            depths.append(Laws.of(LawSettings(), 0.6, cap=cap.value).depth)
        assert found == trace["cap_after"]
        assert depths == pytest.approx(trace["depth_at_alpha_0_6"], abs=1e-9)
    still = DepthCap(None, start=8, least=3)
    for accepted in given["accepted_without_bonus"]:
        still.observe(accepted)
    assert still.value == 8


def test_the_papers_lemma_is_false():
    """Lemma 4.3 bounds the likeliest token from below by 1/k + alpha (k - 1)/k: two equal tokens have less."""
    case = RECORDED["counterexample"]
    alpha = float(confidence(torch.tensor(case["distribution"])))
    assert alpha == pytest.approx(case["alpha"], abs=1e-7)
    claimed = 1 / 10 + alpha * 9 / 10
    assert claimed == pytest.approx(case["claimed_lower_bound_on_p1"], abs=1e-7)
    assert claimed > case["actual_p1"]
    # Theorem 4.4 with identical models (epsilon 0) then promises acceptance above 0.44: the target may choose either.
    assert alpha > (10 - 2) / (2 * (10 - 1))
