"""SAGE: laws and trees by the recorded vectors, exactness of every growth, and what the log says.

The vectors are described in vectors_sage/README.md.
"""

import copy
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Sage, SageTree, Static, TextTreeConfig, check_combination
from draftsmith.eval.policies.sage import DepthCap, Drafted, History, confidence, grow_online, template
from draftsmith.eval.policies.sizing import SizingRules, SizingSettings, grow_nodes
from draftsmith.eval.rules import Sampling
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from exact import Expands, prefixes
from fails import fails_with
from pydantic import TypeAdapter, ValidationError
from test_contract import greedy, not_vacuous
from test_exactness import NoResidual
from test_trees import Checked, continuation, off_target, table
from tiny import proposal, request, target

VECTORS = Path(__file__).parent / "vectors_sage"
RECORDED = json.loads((VECTORS / "sage.json").read_text())
ARRAYS = np.load(VECTORS / "sage.npz")
NAMES = {"best": "best-first", "dfs": "depth-first", "root1": "root", "plain": "plain", "round": "nearest",
         "floor": "floor"}  # fmt: skip


def sizing_of(parameters, alpha, **variant):
    bounds = {"top_k": "k", "min_depth": "d_min", "max_depth": "d_max", "min_width": "w_min", "max_width": "w_max",
              "max_nodes": "n_max"}  # fmt: skip
    settings = SizingSettings(**{name: parameters[key] for name, key in bounds.items()}, **variant)
    return SizingRules.of(settings, alpha, cap=settings.max_depth)


def test_the_defaults_are_the_papers():
    """Algorithm 1 (a template, by the formal line's threshold) with the numbers of section 5.1 and history of 3.3."""
    tree = SageTree(kind="sage")
    assert (tree.growth, tree.threshold, tree.top_k, tree.max_nodes) == ("template", "cumulative", 10, 64)
    assert (tree.min_depth, tree.max_depth, tree.min_width, tree.max_width) == (3, 8, 2, 10)
    assert (tree.history.window, tree.history.low, tree.history.high) == (10, 2.0, 3.0)


def test_confidence_of_any_k():
    """Equation 9: 1 - H / log k, of the k that there are."""
    assert float(confidence(torch.tensor([0.25, 0.25]))) == pytest.approx(0)
    entropy = -sum(p * math.log(p) for p in (0.7, 0.2, 0.1))
    assert float(confidence(torch.tensor([1.4, 0.4, 0.2]))) == pytest.approx(1 - entropy / math.log(3))


def test_confidence():
    for row, parameters in enumerate(RECORDED["parameters"]):
        result = confidence(torch.from_numpy(ARRAYS["logits"]).softmax(-1).topk(parameters["k"]).values)
        assert result.numpy() == pytest.approx(ARRAYS["alpha"][row], abs=1e-9)
        sizing = [sizing_of(parameters, float(alpha)) for alpha in result]
        assert [one.depth for one in sizing] == pytest.approx(ARRAYS["D"][row].tolist(), abs=1e-9)
        assert [one.width for one in sizing] == pytest.approx(ARRAYS["W"][row].tolist(), abs=1e-9)


@pytest.mark.parametrize("number", range(len(RECORDED["cases"])))
def test_sizing_rules_and_templates(number):
    case = RECORDED["cases"][number]
    parameters = RECORDED["parameters"][case["parameters"]]
    sizing = sizing_of(parameters, case["alpha"])
    assert sizing.depth == pytest.approx(case["D"], abs=1e-9)
    assert sizing.width == pytest.approx(case["W"], abs=1e-9)
    assert sizing.levels == case["D_rounded"]
    for level, row in enumerate(case["W_l"], start=1):
        for parent, value in zip((1, 0.5, 0.1, 0.01), row, strict=True):
            assert sizing.width_at(level, parent) == pytest.approx(value, abs=1e-9)
    for level, value in enumerate(case["theta_l"], start=1):
        assert sizing.threshold_at(level) == pytest.approx(value, abs=1e-9)
    ranked = case["topk_prob"]
    for variant, tree in zip(RECORDED["readings"], case["trees"], strict=True):
        assert not tree["rounding_sensitive"]
        sizing = sizing_of(
            parameters, case["alpha"], threshold=variant["threshold"], rounding=variant["rounding"],
            order=NAMES[variant["order"]], first_level=NAMES[variant["first_level"]],
            depth_rounding=NAMES[variant["depth"]],
        )  # fmt: skip
        nodes = grow_nodes(sizing, ranked, lambda some: [ranked] * len(some), levels=sizing.levels)
        paths = sorted((node.path for node in nodes), key=lambda path: (len(path), path))
        assert [list(path) for path in paths] == tree["nodes"]
        static = template(sizing, ranked)
        assert static.choices == (paths or [(0,)]), "nothing above the threshold: one likeliest node"


def test_probabilities_of_the_tree_may_be_renormalised():
    case = next(case for case in RECORDED["cases"] if 0.2 < sum(case["topk_prob"]) < 0.9)
    ranked, result = case["topk_prob"], {}
    for name, given in (("raw", ranked), ("renormalised", ranked), ("by hand", [p / sum(ranked) for p in ranked])):
        settings = {"probabilities": name} if name != "by hand" else {}
        sizing = sizing_of(RECORDED["parameters"][0], case["alpha"], **settings)
        result[name] = template(sizing, given).choices
    assert result["renormalised"] == result["by hand"] != result["raw"]


@pytest.mark.parametrize("number", range(len(RECORDED["online"])))
def test_online_growth(number):
    case = RECORDED["online"][number]
    q = torch.from_numpy(ARRAYS["markov_logits"]).softmax(-1)
    sizing = sizing_of(RECORDED["parameters"][0], case["alpha"], threshold=case["threshold"])
    root, asked = q[case["start_token"]], []

    def expand(parents, tokens):
        asked.extend(tokens.tolist())
        return q[tokens]

    drafted = Drafted(root, 10, Draw("top-k"))
    tree = grow_online(sizing, root, expand, drafted, levels=sizing.levels)
    assert [list(path) for path in ranks(tree)] == case["nodes"]
    assert tree.tokens.tolist() == case["tokens"]
    # A node's expansion is its expansion, and what was expanded was kept.
    for expansion, token in zip(tree.expansions, case["tokens"], strict=True):
        assert expansion < 0 or asked[expansion] == token
    assert len(drafted.rows) == len(asked) + 1
    assert any(expansion >= 0 for expansion in tree.expansions)


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
        cap, result, depths = DepthCap(settings, start=given["cap_start"], least=given["d_min"]), [], []
        for accepted in given["accepted_without_bonus"]:
            cap.observe(accepted)
            result.append(cap.value)
            depths.append(SizingRules.of(SizingSettings(), 0.6, cap=cap.value).depth)
        assert result == trace["cap_after"]
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


# --- exactness ---


def sage(**given):
    return Sage(SageTree(kind="sage", **given))


def tiny_sage(growth, **given):
    """Small enough to enumerate: three tokens, at most two levels."""
    return sage(
        growth=growth, top_k=3, min_depth=1, max_depth=3, min_width=1, max_width=2, max_nodes=6, threshold="local",
        first_level="plain", first_tree="chain5", history={"window": 2, "low": 1, "high": 1, "max_depth": 4}, **given,
    )  # fmt: skip


GROWTHS = pytest.mark.parametrize("growth", ["online", "template", "dynamic"])


@GROWTHS
@pytest.mark.parametrize("confidence_from", ["deepest", "mean"])
def test_enumerated(growth, confidence_from):
    (p, q), shapes = table(3, 3, 3), set()
    policy = tiny_sage(growth, confidence_from=confidence_from)
    assert off_target(continuation(policy, Sampling(), p, q, 3, shapes, max_levels=2), p, 3, 3) < 1e-9
    assert len(shapes) > 2, "the shape changes with what was drafted and accepted"
    assert off_target(continuation(policy, NoResidual(), p, q, 3, set(), max_levels=2), p, 3, 3) > 0.01


class Scripted:
    """A sampled draw that follows a script of choices, and notes how likely they were and how many there were."""

    sampled, name, ends, ranked = True, "sample", frozenset(), Draw.ranked

    def __init__(self, script):
        self.script, self.taken, self.chance, self.open = script, 0, 1.0, []

    def __call__(self, q, count):
        row, orders = q[0], []
        assert row.any(), "nothing is drawn where nothing is proposed"
        for order in itertools.permutations(range(len(row)), count):
            chance, left = 1.0, row.double().clone()
            for place, token in enumerate(order):
                chance *= float(left[token] / left.sum()) if left.any() else 1 / (len(left) - place)
                left[token] = 0
            if chance:
                orders.append((order, chance))
        place = self.script[self.taken] if self.taken < len(self.script) else 0
        if self.taken >= len(self.script):
            self.open.append(len(orders))
        self.taken += 1
        self.chance *= orders[place][1]
        return torch.tensor([orders[place][0]])


def all_draws(grow):
    """(what it grows, its chance) for every way in which `grow(draw)` may draw."""
    waiting = [[]]
    while waiting:
        script = waiting.pop()
        draw = Scripted(script)
        grew = grow(draw)
        if draw.open:  # choices beyond the script: one run for each of the first
            waiting += [[*script, choice] for choice in range(draw.open[0])]
        else:
            yield grew, draw.chance


def test_templates_are_exact_with_sampled_draws():
    """Their shape stands before anything is drawn in the cycle; the first tree and the next ones."""
    (p, q), policy, shapes = table(1, 3, 3), tiny_sage("template"), set()
    policy.max_nodes = 99

    def trees(policy, prefix):
        def grow(draw):
            grew = copy.deepcopy(policy)
            tree = grew.grow(q(prefix), Expands(q, prefix), draw, max_levels=2)
            return grew, tree, prefixes(tree, prefix)

        return all_draws(grow)

    result = continuation(policy, Sampling(), p, q, 2, shapes, trees=trees)
    assert off_target(result, p, 3, 2) < 1e-9
    assert len(shapes) > 1


def test_which_growth_may_be_sampled():
    settings = {"temperature": 1, "draw": "sample", "policy": "sage", "rule": "sampling"}
    for growth in ("online", "dynamic"):
        with pytest.raises(UserError, match="prunes drawn nodes"):
            check_combination(**settings, prunes_by_token=sage(growth=growth).prunes_by_token)
    assert not sage(growth="template").prunes_by_token


# --- through the loop ---


@GROWTHS
@torch.inference_mode()
def test_the_drafter_keeps_what_was_accepted(big, near, growth):
    drafter, policy = Checked(near), sage(growth=growth, threshold="local")
    not_vacuous(generate(target(big), drafter, request(0, 1), greedy(policy, 16)).cycles)
    assert drafter.checked > 20


@GROWTHS
def test_the_log_and_the_sizing_rules(big, near, growth):
    policy, asked = sage(growth=growth), request(1, 1)
    decoding = Decoding(policy, Sampling(), Draw("top-k"), Warp(1.0), 32, ())
    logs = []
    for _ in range(2):
        result = generate(target(big), proposal(near), asked, decoding, torch.Generator().manual_seed(3))
        logs.append(policy.log)
    assert logs[0] == logs[1], "each request starts afresh"
    drafted = [cycle for cycle in result.cycles if cycle.num_nodes]
    assert [(c.levels, c.nodes, c.accepted) for c in policy.log] == [
        (c.num_drafted, c.num_nodes, c.num_accepted) for c in drafted
    ]
    assert policy.log[0].confidence == 0.5 and policy.log[0].nodes == 25
    for cycle in policy.log:
        sizing = SizingRules.of(policy.settings, cycle.confidence, cap=cycle.cap)
        assert (cycle.depth, cycle.width) == (sizing.depth, sizing.width)
    assert all(c.levels <= round(c.depth) and c.nodes <= 64 for c in policy.log[1:])
    assert len({c.confidence for c in policy.log}) > 3
    assert all(cycle.update_s > 0 for cycle in drafted)


def feed(policy, q, accepted, levels=99):
    """One cycle on a draft that always has the same distribution; the likeliest chain is accepted so far."""
    tree = policy.grow(q, lambda parents, tokens: q.expand(len(parents), -1), Draw("top-k"), max_levels=levels)
    path, node = [], ROOT
    while len(path) < accepted and node in tree.children:
        node = tree.children[node][0]
        path.append(node)
    policy.observe(SimpleNamespace(path=tuple(path), tree=tree, num_accepted=len(path)))
    return tree


def peaked(top):
    return torch.cat([torch.tensor([top]), torch.full((19,), (1 - top) / 19)])


@GROWTHS
def test_sure_drafts_get_deep_and_narrow_trees(growth):
    shapes = {}
    for name, top in (("sure", 0.97), ("unsure", 0.3)):
        policy = sage(growth=growth, threshold="local", total="product")
        feed(policy, peaked(top), 2)
        tree = feed(policy, peaked(top), 2)
        shapes[name] = tree.num_levels, max(len(kids) for kids in tree.children.values())
    assert shapes["sure"][0] > shapes["unsure"][0]
    assert shapes["sure"][1] <= shapes["unsure"][1] or growth != "dynamic"
    assert shapes["sure"][0] == 8


@GROWTHS
def test_a_flat_draft_still_gets_one_node(growth):
    policy = sage(growth=growth)
    flat = torch.full((40,), 1 / 40)
    feed(policy, flat, 0)
    tree = feed(policy, flat, 0)
    assert policy.confidence == pytest.approx(0, abs=1e-6)
    assert (tree.num_nodes == 1) == (growth != "dynamic"), "nothing exceeds the threshold"
    assert tree.num_nodes > 0


def test_history_moves_the_deepest_tree():
    policy = sage(history={"window": 2})
    for _ in range(40):
        feed(policy, peaked(0.97), 9)
    assert policy.log[-1].cap == 10, "one level for every two cycles, up to the bound"
    assert policy.log[-1].levels == 10
    for _ in range(40):
        feed(policy, peaked(0.97), 0)
    assert policy.log[-1].cap == 3
    policy.start()
    feed(policy, peaked(0.97), 0)
    assert policy.log[-1].cap == sage().settings.max_depth and len(policy.log) == 1, "each request starts afresh"
    assert sage(history=None).num_levels == 8


def test_which_distribution_says_how_sure():
    """The root is sure and the node after it is not."""
    sure, unsure = peaked(0.97), peaked(0.3)

    def cycle(policy):
        tree = policy.grow(sure, lambda parents, tokens: unsure.expand(len(parents), -1), Draw("top-k"), max_levels=2)
        policy.observe(SimpleNamespace(path=(0,), tree=tree, num_accepted=1))
        return policy.confidence

    alphas = [float(confidence(q.topk(10).values)) for q in (sure, unsure)]
    assert cycle(sage(confidence_from="root")) == pytest.approx(alphas[0], abs=1e-6)
    assert cycle(sage(confidence_from="deepest")) == pytest.approx(alphas[1], abs=1e-6)
    # The first tree expands its root and, in two levels, four nodes.
    assert cycle(sage(confidence_from="mean")) == pytest.approx((alphas[0] + 4 * alphas[1]) / 5, abs=1e-6)


# --- in a recipe ---

TREE = TypeAdapter(TextTreeConfig)


def test_names_of_trees():
    for name, total, levels, width in (("30-4-8", 30, 4, 8), ("48-5-10", 48, 5, 10), ("25-5-8", 25, 5, 8)):
        policy = TREE.validate_python(name).build()
        assert isinstance(policy, Dynamic)
        assert (policy.num_nodes, policy.num_levels, policy.width) == (total - 1, levels, width)
    assert isinstance(TREE.validate_python("sage").build(), Sage)
    assert isinstance(TREE.validate_python("mc_sim_7b_63").build(), Static)
    assert TREE.validate_python("chain").gamma == 5 and TREE.validate_python("static").build().max_nodes == 25
    assert isinstance(TREE.validate_python({"kind": "chain", "gamma": 3}).build(), Chain)
    for wrong in ("30-4", "30-0-8", "sgae"):
        fails_with(r"names no tree|no level", TREE.validate_python, wrong, error=ValidationError)


def test_settings_that_contradict_each_other():
    for wrong in ({"min_depth": 9}, {"min_width": 11}, {"history": {"max_depth": 7}}, {"first_tree": "chain6"},
                  {"history": {"low": 4}}):  # fmt: skip
        fails_with("", SageTree, kind="sage", error=ValidationError, **wrong)
