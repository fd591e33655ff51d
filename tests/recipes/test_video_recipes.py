"""Recipes of the video track: the papers' numbers at full size without a network, and mistakes told by name."""

from dataclasses import replace

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.models.drafters.base import for_decoding
from draftsmith.models.formats.expressible import check_expressible
from draftsmith.models.formats.source import Source, Target
from draftsmith.models.targets.base import language_shape
from draftsmith.models.targets.load import target_config
from draftsmith.recipes.config.files import FOLDER
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan

HEADS = ("pictures", "base", "mtp", "half", "blind")  # of the ablation
SHIPPED = sorted(path.stem for path in (FOLDER / "video").glob("*.yaml"))
QWEN, LLAVA = "recipe=sparrow-qwen2.5-vl-7b", "recipe=sparrow-llava-ov-7b"


def test_a_text_target_has_its_own_chat_template_where_none_is_named():
    stages = load(["recipe=smollm2/eagle3", "stages.states.format.template=llama3"]).recipe.stages
    templates = {name: stage.format.template for name, stage in stages.items()}
    assert templates == {**dict.fromkeys(["prompts", "answers", "eagle3", "evaluate"], "chat"), "states": "llama3"}
    assert load(["recipe=sage-llama3-8b-1b"]).recipe.stages["evaluate"].format.template == "llama3"
    spelled = load(["recipe=smollm2/eagle3"]).recipe
    again = type(spelled).model_validate(dict(spelled))  # of sections that are there already
    assert again.stages["evaluate"].format.template == "chat"


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("sage-")])
def test_sages_tables_have_the_printed_algorithm_with_both_thresholds(name):
    """A method beside them that tells growths apart names them; `tree: sage` is algorithm 1."""
    for stage in load([f"recipe={name}"]).recipe.stages.values():
        trees = {n: (m.tree.growth, m.tree.threshold) for n, m in stage.methods.items() if m.tree.kind == "sage"}
        printed = [n.removesuffix(", local threshold") for n, tree in trees.items() if tree == ("template", "local")]
        assert printed and all(trees[n] == ("template", "cumulative") for n in printed), trees
        assert all(("online" in n) == (growth == "online") for n, (growth, _) in trees.items())
        assert {growth for growth, _ in trees.values()} <= {"template", "online"}


def test_objectives_and_methods_are_the_papers():
    """Schedules are in `test_paper_tables.py`."""
    sparrow = load([QWEN]).recipe.stages
    text, pictures = (sparrow[name].objective for name in ("text", "pictures"))
    assert (text.feature, text.token, text.listmle, text.mtp_steps) == (1.0, 0.1, 0.01, 0)
    assert (pictures.l1, pictures.listmle, pictures.mtp_steps) == (10.0, 0.1, None)
    msd = load(["recipe=msd-qwen2.5-vl-7b"]).recipe.stages
    assert msd["pictures"].objective is None and msd["pictures"].from_stage is None
    hivis = load(["recipe=hivis-llava-ov-7b"]).recipe.stages
    own = [name for name in hivis["evaluate"].methods if "lookup" not in name]
    assert own == ["HiViS"], "null takes the base's methods away"
    # Table 2 and 3 have the target itself as SpecVLM's drafter, greedy alone; heads' breakdowns do not.
    assert sparrow["evaluate"].methods["SpecVLM"].drafter.model == "target"
    assert "SpecVLM" not in sparrow["images"].methods
    assert sparrow["evaluate"].methods["SpecVLM"].temperatures == [0.0]


@pytest.mark.parametrize("name", ["eagle-llava15-7b", "eagle3-llava15-7b", "eagle3-qwen2.5-vl-7b"])
def test_what_is_trained_for_engines_is_served_with_pictures(name):
    """By vLLM: as the rules of its export have it, with the target's own shape."""
    recipe = load([f"recipe={name}"]).recipe
    config = target_config(recipe.target, None, network=False)
    with torch.device("meta"):
        size = getattr(recipe.drafter, "draft_vocab_size", None)
        ids = None if size is None else torch.arange(size)
        head = recipe.drafter.module(recipe.drafter.layer(language_shape(config.get_text_config())), ids)
    source = Source(FOLDER, recipe.drafter, head, Target(config, recipe.target.path), {})
    check_expressible("vllm", source, "all")
    window = recipe.drafter.model_copy(update={"visual_slots": "none"} if "eagle3" in name else {"image": "projected"})
    with pytest.raises(UserError, match=r"pictures here|no input stands at a picture"):
        check_expressible("vllm", replace(source, config=window), "all")


def test_every_row_of_the_ablation_is_measured():
    """Table 6: MTP, IVSB and VATA as each method's head was trained and decodes."""
    loaded = load(["recipe=sparrow-ablation-qwen2.5-vl-7b"]).recipe
    rows = []
    for method in loaded.stages["ablation"].methods.values():
        trained = loaded.stages[method.drafter].drafter or loaded.drafter
        config = for_decoding(trained, **method.settings)
        ivsb = config.ivsb and config.visual(training=True) == "direct"
        rows.append((config.mtp_steps > 0, ivsb, config.visual(training=False) == "none"))
    on, off = True, False
    table_6 = [(off, off, off), (off, off, on), (on, off, off), (on, off, on), (on, on, off), (on, on, on)]
    assert rows == [*table_6, (on, on, on)]


def test_a_row_of_the_ablation_reads_the_layer_that_the_paper_names():
    """Equations 1 and 3: the second-to-last, from the first stage on; in all else Sparrow's row."""
    loaded = load(["recipe=sparrow-ablation-qwen2.5-vl-7b"])
    stages, own = loaded.recipe.stages, loaded.recipe.drafter
    *others, last = stages["ablation"].methods.values()
    heads = [stages[m.drafter].drafter or own for m in others]
    assert {head.state for head in heads} == {"feature"} and heads[-1] == own
    named = stages[last.drafter].drafter
    assert named == own.model_copy(update={"state": -2})
    assert stages["second_text"].drafter == named and last.tree == others[-1].tree and last.settings == {}
    inputs = {p.name: p.inputs for p in plan(loaded.recipe, loaded.path)}
    assert inputs["second"] == {"states/picture_states": "picture_states", "drafter": "second_text"}
    assert all(named in stages[name].drafters for name in ("text_states", "picture_states"))
    skipped = {"drafter", "from_stage"}
    for mine, other in (("second_text", "text"), ("second", "pictures")):
        mine, other = ({n: v for n, v in dict(stages[s]).items() if n not in skipped} for s in (mine, other))
        assert mine == other


def held(recipe, method):
    """What a method's head holds of the visual tokens while it decodes, and what it saw of them in training."""
    config = for_decoding(recipe.stages[method.drafter].drafter or recipe.drafter, **method.settings)
    share = 0.0 if config.visual(training=False) == "none" else config.visual_fraction(training=False)
    return share, dict(config).get("share_by", "last"), config.visual_fraction(training=True)


def test_every_row_of_tables_1_and_7_is_measured():
    """Table 7: one head that holds 100, 50, 12.5 and 0% in decoding; table 1: heads trained with half and none."""
    recipe = load(["recipe=sparrow-ablation-qwen2.5-vl-7b"]).recipe
    stage = recipe.stages["shares"]
    assert stage.benchmarks["sets"].sets == ["ChartQA", "AI2D"]
    rows = [held(recipe, method) for method in stage.methods.values()]
    assert rows == [(share, "last", 1.0) for share in (1.0, 0.5, 0.125, 0.0)] + [(0.5, "last", 0.5), (0.0, "last", 0.0)]
    methods = [*stage.methods.values()]
    assert {m.drafter for m in methods[:4]} == {"pictures"} and len({str(m.tree) for m in methods}) == 1


def test_figure_1b_holds_the_same_shares_by_both_kinds_of_attention():
    """MSD on clips and pictures; all and nothing need no choice."""
    recipe = load(["recipe=msd-qwen2.5-vl-7b"]).recipe
    stage = recipe.stages["retention"]
    assert recipe.drafter.kind == "msd" and stage.benchmarks["sets"].sets == ["VideoDetailCaption", "ChartQA", "AI2D"]
    rows = [held(recipe, method)[:2] for method in stage.methods.values()]
    assert rows == [(1.0, "last"), (0.5, "last"), (0.125, "last"), (0.5, "text"), (0.125, "text"), (0.0, "last")]
    assert {m.drafter for m in stage.methods.values()} == {"pictures"}


def test_figure_5_removes_visual_tokens_layer_by_layer_on_onevision():
    recipe = load([LLAVA]).recipe
    stage = recipe.stages["layers"]
    assert recipe.target.path == "llava-hf/llava-onevision-qwen2-7b-ov-hf"
    assert stage.probes.importance.sets == ["VideoMME", "AI2D"] and stage.probes.importance.layers is None
    assert stage.benchmarks["sets"].convention == "stock", "answers are letters"
    for other in ("msd", "vispec", "hivis"):
        assert "layers" not in load([f"recipe={other}-llava-ov-7b"]).recipe.stages


def test_vispec_orig_stands_in_tables_3_4_and_8_beside_the_retrained_head():
    """Published weights, with the trees of the table; a folder of them may be named."""
    stages = load(["recipe=vispec-qwen2.5-vl-7b"]).recipe.stages
    for name in ("evaluate", "by_length", "images"):
        own, published = (stages[name].methods[called] for called in ("ViSpec", "ViSpec (orig)"))
        assert published.drafter.path == "JLKang/ViSpec-Qwen2.5-VL-7B-Instruct" and published.tree == own.tree
        assert own.drafter == "pictures" and published.drafter.kind == "vispec"
    local = load(["recipe=vispec-qwen2.5-vl-7b", "stages.images.methods.ViSpec (orig).drafter.path=heads/vispec"])
    assert local.recipe.stages["images"].methods["ViSpec (orig)"].drafter.path == "heads/vispec"


def test_the_ablation_trains_text_once():
    """And a head from it for each row that differs, of equal settings (the recorded dry run has their steps)."""
    loaded = load(["recipe=sparrow-ablation-qwen2.5-vl-7b"])
    starts = {p.name: p.inputs["drafter"] for p in plan(loaded.recipe, loaded.path) if p.name in HEADS}
    assert starts == dict.fromkeys(HEADS, "text")
    settings = [{n: v for n, v in dict(loaded.recipe.stages[name]).items() if n != "drafter"} for name in HEADS]
    assert all(other == settings[0] for other in settings)


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("sparrow-")])
def test_rows_are_of_heads_without_what_is_ours(name):
    """Random gaps and blind samples are not in the paper: no head of its tables has them, with VATA or without."""
    recipe = load([f"recipe={name}"]).recipe
    methods = [m for stage in recipe.stages.values() if stage.kind == "evaluate" for m in stage.methods.values()]
    heads = [recipe.stages[m.drafter].drafter or recipe.drafter for m in methods if isinstance(m.drafter, str)]
    assert len(heads) >= 4 and {(head.gap_share, head.blind_share) for head in heads} == {(0.0, 0.0)}
    assert {m.settings.get("vata", True) for m in methods} == {True, False}
