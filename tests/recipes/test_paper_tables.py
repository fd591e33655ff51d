"""Which recipes measure which tables: the models, sets, lengths, truncation and methods that the papers print."""

import pytest
from draftsmith.recipes.config.load import load


def stages(name):
    return load([f"recipe={name}"]).recipe.stages


def printed(stage):
    """Bounds of LANTERN as its tables print them: (k, delta, temperature) of each rule."""
    return {
        residual: {(m.rule.k, m.rule.delta, t) for m in stage.methods.values() for t in stage.temperatures
                   if m.rule.kind == "lantern" and m.rule.residual == residual and m.allowed(t)}
        for residual in ("paper", "reference")
    }  # fmt: skip


@pytest.mark.parametrize("name", ["eagle-llamagen-xl-stage1", "eagle-llamagen-xl-stage2"])
def test_lanterns_tables_2_and_6_on_llamagen(name):
    """Section 5.1 and appendix B.2: both temperatures, top-k 1000, guidance 7.5, 1,000 captions; quality of 30,000."""
    recipe = load([f"recipe={name}"]).recipe
    assert (recipe.target.size, recipe.target.cfg_scale) == ("XL", 7.5)
    assert recipe.target.image_size == (512 if "stage2" in name else 256)
    bounds = {(1000, 0.05, 0.0), (1000, 0.2, 0.0), (1000, 0.1, 1.0), (1000, 0.4, 1.0)}
    for stage, captions in (("evaluate", 1000), ("quality", 30_000)):
        found = recipe.stages[stage]
        assert printed(found) == {"paper": bounds, "reference": bounds}
        assert (found.temperatures, found.top_k, found.top_p) == ([0.0, 1.0], 1000, 1.0)
        assert found.benchmarks["captions"].prompts.max_samples == captions
        assert found.methods["EAGLE-2"].tree.total == 60
    metrics = recipe.stages["quality"].benchmarks["captions"].quality.metrics
    assert set(metrics) == {"fid", "clip", "precision_recall", "hpsv2"}


def test_lanterns_settings_are_methods_of_a_recipe():
    """Tables 3, 4, 10 and 11, figure 5: the grid of k and delta, distances, divergences and replaced codes."""
    stage = stages("lantern-settings-llamagen-xl-stage1")["settings"]
    rules = [m.rule for m in stage.methods.values() if m.rule.kind == "lantern"]
    grid = {(r.k, r.delta) for r in rules if (r.metric, r.divergence) == ("l2", "tvd")}
    assert grid >= {(k, delta) for k in (100, 300, 1000) for delta in (0.05, 0.1, 0.2, 0.4)}
    assert {(r.k, r.delta, r.metric) for r in rules if r.metric != "l2"} == {
        (1000, 0.2, "cosine"), (1000, 0.2, "random")
    }  # fmt: skip
    bounds = {(r.divergence, r.delta) for r in rules if r.k == 1000 and r.metric == "l2"}
    assert bounds >= {("tvd", 0.2), ("jsd", 0.13), ("tvd", 0.3), ("jsd", 0.2)}, "those that accept alike"
    assert [m.rule.k for m in stage.methods.values() if m.rule.kind == "replaced"] == [50, 100, 1000]
    captions = stage.benchmarks["captions"]
    assert (stage.temperatures, captions.prompts.max_samples) == ([0.0, 1.0], 5000), "table 7 counts up to 5,000"
    assert {"fid", "precision_recall", "hpsv2"} <= set(captions.quality.metrics)


def test_the_papers_tables_on_anole():
    """LANTERN, table 6; ADT-Tree, tables I to IV (100 captions) and figure 8: guidance 3.0, top-k 2000."""
    recipe = load(["recipe=eagle-anole-7b"]).recipe
    stage = recipe.stages["evaluate"]
    assert (recipe.target.kind, recipe.target.cfg_scale, stage.top_k) == ("anole", 3.0, 2000)
    assert (stage.temperatures, stage.benchmarks["captions"].prompts.max_samples) == ([0.0, 1.0], 100)
    table_6 = recipe.stages["lantern"]
    assert (table_6.benchmarks["captions"].prompts.max_samples, table_6.top_k) == (1000, 2000)
    assert printed(table_6) == {"paper": {(100, 0.5, 1.0)}, "reference": {(100, 0.5, 1.0)}}
    for name, rule in (("EAGLE-2", "exact"), ("LANTERN", "lantern"), ("ADT-Tree", "exact"),
                       ("ADT-Tree + LANTERN", "lantern")):  # fmt: skip
        assert stage.methods[name].rule.kind == rule and all(map(stage.methods[name].allowed, (0.0, 1.0)))
    starts = {name: stage.methods[name].tree.start_from for name in stage.methods if name.startswith("ADT-Tree")}
    assert starts == {
        "ADT-Tree": "horizontal", "ADT-Tree + LANTERN": "horizontal",
        "ADT-Tree, vertical": "vertical", "ADT-Tree, random": "random",
    }  # fmt: skip
    # Tables II to IV are asked for by these keys, which docs/papers.md names.
    asked = [
        "stages.evaluate.benchmarks.captions.prompts.path=PartiPrompts.tsv",
        "stages.evaluate.benchmarks.captions.quality.metrics=[inception_score,aesthetic,fid,clip,hpsv2]",
    ]
    captions = load(["recipe=eagle-anole-7b", *asked]).recipe.stages["evaluate"].benchmarks["captions"]
    assert captions.prompts.path == "PartiPrompts.tsv" and len(captions.quality.metrics) == 5


@pytest.mark.parametrize(("name", "size"), [("eagle-llamagen-c2i-l", "L"), ("eagle-llamagen-c2i-xl", "XL")])
def test_every_row_of_adt_trees_table_v(name, size):
    recipe = load([f"recipe={name}"]).recipe
    assert (recipe.target.size, recipe.target.condition) == (size, "class")
    stage = recipe.stages["evaluate"]
    rows = {
        (tree.start_from, tree.fixed_depth, tree.fixed_width)
        for tree in (m.tree for m in stage.methods.values() if m.rule.kind == "exact" and 1.0 in stage.temperatures)
        if tree.kind == "adt" and tree.preset == "llamagen"
    }
    start = "horizontal"
    assert rows == {(start, None, None), ("token-flock", None, None), (start, 2, None), (start, None, 25),
                    (start, 2, 25)}  # fmt: skip
    assert recipe.target.cfg_scale == 3.0, "section V-A"


def test_sparrows_tables_2_and_5():
    """LLaVA-OneVision 7B at 25k, both temperatures, 25-5-8; MSD's breakdown at 4.5k, 15k and 25k."""
    for name, called in (("sparrow", "Sparrow"), ("msd", "MSD"), ("vispec", "ViSpec"), ("hivis", "HiViS")):
        found = stages(f"{name}-llava-ov-7b")
        table = found["evaluate"]
        assert table.benchmarks["sets"].sets == ["VideoDetailCaption", "MVBench", "LongVideoBench", "VideoMME"]
        assert (table.lengths, table.temperatures) == (["25k"], [0.0, 1.0])
        tree = table.methods[called].tree
        assert (tree.kind, tree.total, tree.depth + 1, tree.width) == ("dynamic", 25, 5, 8)
        assert found["by_length"].benchmarks["sets"].sets == ["VideoDetailCaption"]
        assert found["by_length"].lengths == ["4.5k", "15k", "25k"]
    # SpecVLM's default: a static tree of 25 nodes, five deep (section 4).
    policy = stages("sparrow-llava-ov-7b")["evaluate"].methods["SpecVLM"].policy()
    assert (policy.max_nodes, policy.num_levels) == (25, 5)


@pytest.mark.parametrize("name", ["sparrow", "msd", "vispec", "hivis"])
def test_sparrows_tables_4_and_8(name):
    found = stages(f"{name}-qwen2.5-vl-7b")
    assert found["by_length"].lengths == ["0.5k", "1.5k", "17k", "25k"]
    assert found["by_length"].benchmarks["sets"].sets == ["VideoDetailCaption"]
    assert found["images"].benchmarks["sets"].sets == ["COCO", "MME", "ScienceQA", "MM-Vet"]
    assert found["images"].temperatures == [0.0, 1.0]
    for stage, shape in (("evaluate", (30, 4, 8)), ("by_length", (48, 5, 10)), ("images", (30, 4, 8))):
        trees = {m.tree for m in found[stage].methods.values() if m.tree.kind == "dynamic"}
        assert {(tree.total, tree.depth + 1, tree.width) for tree in trees} == {shape}, stage


def test_where_sparrows_ablation_is_measured():
    """Table 6: MME's pictures, clips of 0.5k to 25k, 48-5-10; figures 2, 3 and 6 of one stage."""
    found = stages("sparrow-ablation-qwen2.5-vl-7b")
    table = found["ablation"]
    assert table.benchmarks["sets"].sets == ["MME", "VideoDetailCaption"]
    assert table.lengths == ["0.5k", "1.5k", "6k", "17k", "25k"]
    assert {(m.tree.total, m.tree.depth + 1, m.tree.width) for m in table.methods.values()} == {(48, 5, 10)}
    layers = found["layers"]
    assert layers.probes.states and layers.probes.importance.layers is None
    assert layers.benchmarks["sets"].convention == "stock", "answers are letters"


SAGE = {  # recipe -> its target and draft, video sets, and the methods beside SAGE
    "sage-llava-ov-72b-7b": ("72b", "7b", ["VideoDetailCaption", "MVBench", "MLVU", "LongVideoBench"],
                             {"SD-Chain", "SD-Tree", "SpecVLM"}),
    "sage-qwen2.5-vl-72b-7b": ("72B", "7B", ["VideoDetailCaption", "MVBench", "LongVideoBench"],
                               {"SD-Chain", "SD-Tree", "SpecVLM"}),
    "sage-qwen3-vl-235b-8b": ("235B-A22B", "8B", ["VideoDetailCaption"], {"SD-Tree", "SpecVLM"}),
    "sage-llama3-8b-1b": ("8B", "1B", ["GSM8K", "HumanEval"], {"Native-SD"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAGE)
def test_sages_tables_1_to_4(name):
    """Section 5.1: greedy, 90% pruned for clips; the baselines draft with every visual token, SpecVLM with as many."""
    target, draft, sets, beside = SAGE[name]
    recipe = load([f"recipe={name}"]).recipe
    stage = recipe.stages["evaluate"]
    assert f"-{target}-" in recipe.target.path and f"-{draft}-" in recipe.drafter.model.path
    assert stage.benchmarks["sets"].sets == sets and stage.temperatures == [0.0]
    ratio = {n: (m.drafter or recipe.drafter).ratio for n, m in stage.methods.items() if "lookup" not in n}
    assert beside <= {*stage.methods}
    assert {ratio[n] for n in ratio if n.startswith(("SAGE", "SpecVLM"))} == {0 if "llama3" in name else 0.9}
    assert {ratio[n] for n in beside if n != "SpecVLM"} == {0}


def test_sages_pictures_table_5_and_figure_3():
    """Pictures are pruned by 80%; table 5's ratios with each printed threshold; 512 to 2,048 tokens."""
    recipe = load(["recipe=sage-llava-ov-72b-7b"]).recipe
    images, pruning, generated = (recipe.stages[name] for name in ("images", "pruning", "generated"))
    assert images.benchmarks["sets"].sets == ["TextVQA", "GQA", "ChartQA", "SEED-Bench"]
    assert {m.drafter.ratio for n, m in images.methods.items() if n.startswith(("SAGE", "SpecVLM"))} == {0.8}
    for threshold in ("cumulative", "local"):
        methods = [m for m in pruning.methods.values() if m.tree.threshold == threshold]
        ratios = [(m.drafter or recipe.drafter).ratio for m in methods]
        assert ratios == [0, 0.3, 0.6, 0.7, 0.8, 0.9, 0.95]
    assert generated.max_new_tokens == [512, 1024, 2048] and {"SAGE", "SpecVLM"} <= {*generated.methods}
    for stage in (pruning, generated):
        assert stage.benchmarks["sets"].sets == ["VideoDetailCaption"]


def test_tabeds_tables_5_and_9():
    """The target on Spot-the-Diff and MagicBrush, the draft on OCRBench and TextCaps: LLaVA-1.5 7B and 68M."""
    stage = stages("tabed-sweep")["llava15_7b"]
    assert set(stage.benchmarks["suite"].quality.sets) == {"Spot", "MB", "OCRBench", "TextCaps"}
    assert "1.5-68M" in stage.drafters and stage.target.path == "llava-hf/llava-1.5-7b-hf"


@pytest.mark.parametrize("family", ["llava-ov-7b", "qwen2.5-vl-7b"])
@pytest.mark.parametrize("kind", ["sparrow", "msd", "vispec", "hivis"])
def test_heads_of_sparrows_tables_train_as_appendix_c3_says(kind, family):
    """68,000 conversations and 68,000 pictures at batch 16: 20 epochs of each in turn; of MSD 40, mixed linearly."""
    found = stages(f"{kind}-{family}")
    assert found["text_states"].expected.samples == found["picture_states"].expected.samples == 68_000
    assert {found[name].data.question_end for name in ("answers", "picture_states")} == {
        "Please answer with at least 1000 words."
    }
    trained = {name: (stage.epochs, stage.batch_size) for name, stage in found.items() if stage.kind == "train"}
    if kind == "msd":
        assert trained == {"pictures": (40, 16)} and found["pictures"].visual_share == "linear"
        assert found["pictures"].num_text_epochs == 20
    else:
        assert trained == {"text": (20, 16), "pictures": (20, 16)} and found["pictures"].from_stage == "text"
