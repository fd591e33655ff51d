"""Recipes of the visual track: what does not fit together is told by name, with a hint, before anything is written."""

import pytest
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config.files import recipe_names
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan

DEMO = "recipe=demo/visual-ar"
LANTERN = "stages.evaluate.methods.LANTERN.rule"


def test_presets_are_the_papers_methods():
    def methods(*more):
        # The presets' k are for a codebook of the published size.
        size = ["target.shape.vocab_size=16384", "target.vq.codebook_size=16384"]
        recipe = load([DEMO, "stages.evaluate.methods=null", *size, *more]).recipe
        return recipe.stages["evaluate"].methods

    adt = methods("stages.evaluate.methods={}", "stages.evaluate.preset=adt-llamagen")
    assert list(adt) == ["EAGLE-2", "LANTERN", "ADT-Tree", "ADT-Tree + LANTERN"]
    stages = load(["recipe=eagle-anole-7b"]).recipe.stages
    anole = stages["evaluate"].methods
    for method in ("ADT-Tree", "ADT-Tree + LANTERN"):  # section V-A
        assert (adt[method].tree.width_step, adt[method].tree.width_range) == (10, (3, 40))
        assert (anole[method].tree.width_step, anole[method].tree.width_range) == (3, (3, 14))
    lantern = methods("stages.evaluate.methods={}", "stages.evaluate.preset=lantern")
    assert next(iter(lantern)) == "EAGLE-2"
    # ADT-Tree with LANTERN on Anole: the bound of its authors' page.
    assert {(m.rule.k, m.rule.delta) for m in anole.values() if m.rule.kind == "lantern"} == {(100, 0.5)}
    # A method beside the preset is added to it, and one of its name takes its place.
    own = "{mine: {tree: {kind: chain, gamma: 2}}, LANTERN: {tree: {kind: chain, gamma: 2}}}"
    changed = methods(f"stages.evaluate.methods={own}", "stages.evaluate.preset=adt-llamagen")
    assert {*changed} == {*adt, "mine"} and changed["LANTERN"].tree.kind == "chain"


# Trees of one evaluation whose sizes the papers print apart: recipe -> numbers of nodes without the root, and where.
PRINTED_APART = {
    "sage-": ({25, 64}, "SAGE, section 5.1 (N_max 64) and appendix A.1 (SpecVLM's tree); rows with 25 stand beside"),
    "sparrow-llava-ov-7b": ({24, 25}, "Sparrow, section 5: both are called 25, one with the root and one without"),
    "sparrow-qwen": ({29, 25}, "Sparrow, section 5: 30-4-8, and SpecVLM's default of 25"),
    "demo/smollm2": ({11, 23}, "trees of 12 and of 24, which the rows' names give"),
    "smollm2/eagle3": ({11, 23}, "trees of 12 and of 24, which the rows' names give"),
    "eagle": ({59, 29}, "EAGLE's own 60 and Sparrow's 30, which the rows' names give"),
}


@pytest.mark.parametrize("name", recipe_names())
def test_trees_that_are_compared_have_the_same_number_of_nodes(name):
    """Chains aside, which are another baseline. A sampled static list sets the number: nothing can cut it."""
    for stage in load([f"recipe={name}"]).recipe.stages.values():
        sizes = (
            {m.policy(grid=1).num_nodes for m in stage.methods.values() if m.tree.kind != "chain"}
            if stage.kind == "evaluate"
            else {}
        )
        apart = [allowed for start, (allowed, _) in PRINTED_APART.items() if name.startswith(start)]
        assert len(sizes) <= 1 or sizes in apart, sizes


def test_heads_are_selected_and_measured_with_the_same_tree():
    for name in ("eagle-llamagen-xl-stage1", "eagle-llamagen-c2i-xl", "eagle-anole-7b"):
        stages = load([f"recipe={name}"]).recipe.stages
        assert stages["head"].decoding.tree == stages["evaluate"].methods["EAGLE-2"].tree, name
        assert stages["head"].decoding.tree.total == 60, "appendix B.2 of LANTERN: tokens passed to the target"


def test_lantern_plus_plus():
    """Static trees with sampled drafts, 10 neighbours, the multiplicative bound; the rest is the head's recipe."""
    for name, base in (("xl-stage1", "eagle-llamagen-xl-stage1"), ("anole", "eagle-anole-7b")):
        (recipe,) = (load([f"recipe={n}"]).recipe for n in recipe_names() if n.startswith("lanternpp-") and name in n)
        head = load([f"recipe={base}"]).recipe
        assert recipe.output == head.output and recipe.stages["head"] == head.stages["head"]
        plus = {n: m for n, m in recipe.stages["lanternpp"].methods.items() if n.startswith("LANTERN++")}
        assert all(m.tree.kind == "static" and m.rule.bound == "multiplicative" for m in plus.values())
        sampled = plus["LANTERN++ (k = 10, lambda = 4)"]
        assert (sampled.draw, sampled.rule.k, sampled.rule.lambda_) == ("sample", 10, 4)
        assert {m.rule.residual for m in plus.values()} == {"paper", "reference"}


def test_adt_trees_head_of_200000_pairs():
    """Section V-A."""
    recipe = load(["recipe=eagle-llamagen-xl-stage1-200k"]).recipe
    assert recipe.stages["encode"].source.max_samples == recipe.stages["head"].expected.samples == 200_000
    assert recipe.stages["head"].condition_dropout == 0.1 and recipe.target.cfg_scale == 3.0
    evaluate = recipe.stages["evaluate"]
    assert evaluate.drawing.prompts.max_samples == 100
    adapting = [m.tree for m in evaluate.methods.values() if m.tree.kind == "adt"]
    assert {(t.threshold, t.depth_step, t.width_step, t.depth_range, t.width_range) for t in adapting} == {
        (1.0, 1, 10, (0, 10), (3, 40))
    }


def test_a_released_rule_as_a_baseline_is_warned_of_when_the_recipe_loads(capsys):
    """`residual: reference` with a bound of 0 (tests/eval/test_lantern.py has its distance from the target)."""
    base = [DEMO, f"{LANTERN}.residual=reference", f"{LANTERN}.delta=0", "stages=[evaluate]"]
    expected = "stages.evaluate.methods.LANTERN: residual: reference with delta 0 is no exact baseline"
    assert main([*base, "dry_run=true"]) == 0 and f"warning: {expected}" in capsys.readouterr().out
    main(["check", *base])
    (found,) = [part for part in capsys.readouterr().out.splitlines() if part.startswith("warning")]
    assert expected.removeprefix("stages.evaluate.") in found
    greedy = "stages.evaluate.methods.LANTERN.temperatures=[0.0]"
    for other in (f"{LANTERN}.residual=paper", f"{LANTERN}.delta=0.1", greedy):
        assert load([*base, other]).recipe.stages["evaluate"].warnings() == [], other


def test_inputs_are_the_stages_that_made_them():
    loaded = load([DEMO])
    inputs = {p.name: p.inputs for p in plan(loaded.recipe, loaded.path)}
    assert inputs["codes"] == {"data": "world", "vq": "vq"}
    assert inputs["features"] == {"data": "world", "vq": "vq", "text": "target"}
    assert inputs["target"] == {"codes": "codes", "tokenizer": "world"}
    assert inputs["head"] == {"codes": "features", "target": "target", "vq": "vq", "text": "target", "data": "world"}
    # A second head goes on from the first, unless it is told to start anew.
    assert "drafter" not in inputs["head_without_dropout"]
    assert inputs["evaluate"]["reader"] == "reader" and inputs["evaluate"]["drafter/head"] == "head"
