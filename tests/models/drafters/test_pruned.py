"""Pruning of visual tokens by the target's attention, and SpecVLM's trees and rounds, by the recorded vectors.

The vectors are described in vectors_pruned/README.md.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.pictures import IMAGE, TEXT
from draftsmith.eval.policies import CHOICES, Draw, Static
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.decoder import PromptRows
from draftsmith.models.decoding.tree import ROOT, Tree, ancestor_mask
from draftsmith.models.drafters.pruned import PrunedConfig, keep_visual, pruned_prompt, visual_scores
from fails import fails_with
from pydantic import ValidationError

VECTORS = Path(__file__).parents[1] / "vectors_pruned"
ARRAYS = np.load(VECTORS / "specvlm.npz")
RECORDED = json.loads((VECTORS / "specvlm.json").read_text())


def array(name):
    return torch.from_numpy(ARRAYS[name])


@pytest.mark.parametrize("number", range(len(RECORDED["cases"])))
def test_what_is_kept(number):
    case, prefix = RECORDED["cases"][number], f"case{number}"
    ids = array(f"{prefix}_input_ids")
    modality = torch.where(ids == case["visual_token_id"], IMAGE, TEXT).to(torch.int8)
    recorded = array(f"{prefix}_attention")
    # As a target hands it out: a row, averaged over the queries.
    attention = {layer: weights.mean(1)[None] for layer, weights in enumerate(recorded)}
    scores = visual_scores(attention, modality)
    assert torch.allclose(scores.double(), array(f"{prefix}_scores"), atol=1e-6)
    for entry in case["ratios"]:
        ratio, visual = entry["ratio"], (modality != TEXT).nonzero().flatten()
        for how, key, budget in (("round", "keep_round", "budget_round"), ("truncate", "keep", "budget_int")):
            config = PrunedConfig(kind="pruned", ratio=ratio, budget=how)
            assert config.num_kept(case["visual_tokens"]) == entry[budget]
            kept = keep_visual(scores, entry[budget])
            if how == "truncate":
                first = scores.argsort(descending=True, stable=True)[: entry["taken_by_attention"]].tolist()
                assert entry["taken_by_attention"] == min(entry["tokens_for_40_percent"], entry[budget])
                assert set(first) <= set(kept.tolist()) and len(kept) - len(first) == entry["uniform"]
            assert kept.tolist() == array(f"{prefix}_{key}_{ratio}").tolist()
        stays = modality == TEXT
        stays[visual[kept]] = True
        assert ids[stays].tolist() == array(f"{prefix}_pruned_ids_{ratio}").tolist()


def test_shares_are_of_a_whole():
    for wrong in ({"attention_share": 1.1}, {"attention_share": 0}, {"ratio": 1}):
        fails_with("", PrunedConfig, kind="pruned", error=ValidationError, **wrong)


def test_the_first_step_is_the_attention_alone():
    scores = torch.tensor([0.05, 0.4, 0.05, 0.3, 0.2])
    assert keep_visual(scores, 1, share=0.6).tolist() == [1], "at most the budget"
    assert keep_visual(scores, 2, share=0.6).tolist() == [1, 3]
    assert keep_visual(scores, 3, share=0.6).tolist() == [0, 1, 3], "then those at even places, from the first"
    assert keep_visual(scores, 5).tolist() == [0, 1, 2, 3, 4]
    assert keep_visual(scores, 0).tolist() == []


def test_a_prompt_that_ends_with_its_picture_is_refused():
    modality = torch.tensor([TEXT, IMAGE, IMAGE], dtype=torch.int8)
    fails_with("no text after its last picture", visual_scores, {0: torch.rand(1, 2, 3)}, modality)


@pytest.mark.parametrize("positions", ["compact", "target"])
def test_a_pruned_prompt_in_three_coordinates(positions):
    """What Qwen3-VL adds after its first layers goes with the tokens that it is added to."""
    visual = torch.tensor([[False, True, True, True, False, False]])
    placed = torch.randint(0, 9, (3, 1, 6))
    prompts = PromptRows(torch.randn(1, 6, 4), placed, torch.tensor([8]), None, visual, (torch.randn(3, 4),))
    kept = torch.tensor([0, 2, 3, 4, 5])
    result = pruned_prompt(prompts, kept, positions=positions)
    assert torch.equal(result.embeds, prompts.embeds[:, kept])
    assert result.visual.tolist() == [[False, True, True, False, False]]
    assert torch.equal(result.deepstack[0], prompts.deepstack[0][1:])
    if positions == "compact":
        assert torch.equal(result.positions, torch.arange(5).expand(3, 1, 5))
        assert result.rope_delta == 0
    else:
        assert torch.equal(result.positions, placed[:, :, kept])
        assert result.rope_delta == 8 - 5, "the next token stands where the target has it"


TREES = {"static25": CHOICES["mc_sim_7b_63"], "chain5": CHOICES["chain5"]}


def nodes(name):
    return [tuple(rank for rank in path if rank >= 0) for path in array(f"{name}_nodes").tolist()]


def test_a_list_that_skips_a_sibling_is_refused():
    """The recorded custom list does; with sampled draws the residual would miss the one that was passed over."""
    fails_with("skips a sibling", Static, nodes("custom"))


@pytest.mark.parametrize("name", TREES)
def test_trees(name):
    assert sorted(TREES[name]) == sorted(nodes(name))
    for number in range(2):
        tree, asked = drafted(name, number)
        assert torch.equal(tree.ancestor_mask(), array(f"{name}_attn_mask").bool())
        assert [0, *tree.depths] == array(f"{name}_depth").tolist()
        assert [3, *tree.tokens.tolist()] == array(f"{name}_round{number}_tree_tokens").tolist()
        counts = RECORDED["trees"][name]
        assert [tree.depths.count(level + 1) for level in range(tree.num_levels)] == counts["depth_counts"]
        assert asked == counts["expanded_per_level"]
        assert sum(counts["depth_counts"]) == counts["nodes"] == tree.num_nodes
        levels_of_drafting(name, tree, asked)


def levels_of_drafting(name, tree, asked):
    """Where each token stands among the candidates, and what each expanded node sees of the others of its level."""
    expanded = [
        ROOT,
        *sorted((n for n in range(tree.num_nodes) if tree.expansions[n] >= 0), key=lambda n: tree.expansions[n]),
    ]
    ranks = [tree.children[parent].index(node) for node, parent in enumerate(tree.parents)]
    flat = [1 + 10 * expanded.index(parent) + rank for parent, rank in zip(tree.parents, ranks, strict=True)]
    assert [0, *flat] == array(f"{name}_flat_topk_index").tolist()
    first, mask = 0, ancestor_mask(tuple(expanded.index(tree.parents[n]) - 1 for n in expanded[1:]))[1:, 1:]
    for level, count in enumerate(asked):
        assert torch.equal(
            mask[first : first + count, : first + count], array(f"{name}_draft_level{level}_mask").bool()
        )
        first += count


@pytest.mark.parametrize("name", [*TREES, "custom"])
@pytest.mark.parametrize("number", range(2))
def test_greedy_rounds(name, number):
    tree = listed(number) if name == "custom" else drafted(name, number)[0]
    assert torch.equal(tree.ancestor_mask(), array(f"{name}_attn_mask").bool())
    assert [0, *tree.depths] == array(f"{name}_depth").tolist()
    prefix = f"{name}_round{number}"
    p = torch.nn.functional.one_hot(array(f"{prefix}_target_argmax")).float()
    verified = Greedy()(tree, p)
    assert verified.num_accepted == int(array(f"{prefix}_accept_length"))
    assert verified.bonus == int(array(f"{prefix}_next_token"))
    row = array(f"{name}_paths")[int(array(f"{prefix}_best_path"))]
    assert tuple(node + 1 for node in verified.path) == tuple(row[1 : verified.num_accepted + 1].tolist())
    tokens = [3, *tree.tokens.tolist()]
    padded = [[tokens[n] if n >= 0 else -1 for n in path] for path in array(f"{name}_paths").tolist()]
    assert padded == array(f"{prefix}_path_tokens").tolist()


def listed(number):
    """The recorded list that no policy takes, as the tree that it stands for: the rule and the masks do."""
    paths = nodes("custom")
    parents = tuple(paths.index(path[:-1]) if path[:-1] else ROOT for path in paths)
    return Tree(array(f"custom_round{number}_tree_tokens")[1:], parents, (ROOT,) * len(paths))


def drafted(name, number):
    """The tree that the real policy grows from the recorded likeliest tokens, and the nodes expanded at each level."""
    topk = array(f"{name}_round{number}_topk_tokens")
    size, asked = int(topk.max()) + 1, []
    rows = torch.zeros(len(topk), size)
    for row, tokens in zip(rows, topk, strict=True):
        row[tokens] = torch.arange(10, 0, -1.0)

    def expand(parents, tokens):
        first = 1 + sum(asked)
        asked.append(len(parents))
        return rows[first : first + len(parents)]

    return Static(TREES[name]).grow(rows[0], expand, Draw("top-k"), max_levels=99), asked
