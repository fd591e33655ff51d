"""Recipes of the video track: the papers' numbers at full size without a network, and mistakes told by name."""

import re
from dataclasses import replace

import pytest
import torch
from command_line import prints
from draftsmith.core.errors import UserError
from draftsmith.models.drafters.base import for_decoding
from draftsmith.models.formats.expressible import check_expressible
from draftsmith.models.formats.source import Source, Target
from draftsmith.models.targets.base import language_shape
from draftsmith.models.targets.load import target_config
from draftsmith.recipes.config.load import FOLDER, load
from draftsmith.recipes.config.plan import plan
from recorded import recorded_dry_run

HEADS = ("pictures", "base", "mtp", "half", "blind")  # of the ablation
SHIPPED = sorted(path.stem for path in (FOLDER / "video").glob("*.yaml"))
QWEN, LLAVA = "recipe=sparrow-qwen2.5-vl-7b", "recipe=sparrow-llava-ov-7b"
SPECVLM = "recipe=specvlm-qwen2.5-vl-72b-7b"
HEAD = "258,751,488"  # q and o 12.8M each, k and v 3.7M, MLP 203.7M, FC 25.7M
EXPECTED = {
    "sparrow-llava-ov-7b": [HEAD, "8,030,807,584", "648 GB in all", "1.4 TB in all", "steps 80,760", "24 nodes"],
    "sparrow-qwen2.5-vl-7b": [HEAD, "8,292,166,656", "9.55 MB a sample, 649 GB", "8.91 MB a sample, 606 GB in all",
                              "layer 14 at visual tokens", "0.5k visual tokens, 1.5k visual tokens, 17k"],
    "sparrow-ablation-qwen2.5-vl-7b": ["layers 27 at the same tokens, layer 0, 14 at visual tokens",
                                       "1.3 TB in all", "1.21 TB in all", "12.5% in decoding: drafter of",
                                       "base + VATA: drafter of stage base",
                                       "0.5k visual tokens, 1.5k visual tokens, 6k"],
    "sparrow-qwen3-vl-8b": ["8,767,123,696", "226,504,960", "layer 18 at visual tokens"],
    "msd-llava-ov-7b": [HEAD, "layer 0 at visual tokens", "steps 161,520", "MSD + VATA"],
    "msd-qwen2.5-vl-7b": [HEAD, "samples 136,000 (declared), 6,800 of them held out; 68,000 with pictures"],
    "mmspec-llava15-7b": ["7,063,427,072", "723 turns", "MSD + ViSkip: kind msd", "no draft at 0.35"],
    "mmspec-qwen2.5-vl-7b": ["8,292,166,656", "ViSpec + ViSkip: kind vispec", "880 conversations", "at most 29 nodes"],
    "vispec-llava-ov-7b": ["345,017,344", "ViSpec: drafter of stage pictures"],
    "vispec-qwen2.5-vl-7b": ["345,017,344", "layer 0 at visual tokens", "clips of MVBench at 13k visual tokens",
                             "ViSpec (orig): kind vispec, JLKang/ViSpec-Qwen2.5-VL-7B-Instruct; tree"],
    "hivis-llava-ov-7b": ["258,758,656", "470 GB in all"],
    "hivis-qwen2.5-vl-7b": ["258,758,656", "470 GB in all"],
    "eagle-llava15-7b": ["235,937,792", "7,063,427,072", "the target runs in every step", "at most 59 nodes"],
    "eagle3-llava15-7b": ["434,388,992", "EAGLE-3, 30 nodes", "EAGLE-3 + VATA"],
    "eagle3-qwen2.5-vl-7b": ["402,798,592", "the target runs in every step"],
    "adapt-eagle3-qwen2.5-vl-7b": ["402,798,592"],
    "eagle3-qwen3.5-9b": ["399,523,840", "9,409,813,744", "the target runs in every step"],
    "mtp-qwen3.5-9b": ["243,290,624", "9,409,813,744", "MTP as shipped: kind mtp"],
    "eagle3-internvl3-8b": ["402,798,592", "7,944,373,760", "the target runs in every step"],
    "eagle3-mistral-small-3.1-24b": ["24,011,361,280", "the target runs in every step"],
    "eagle3-gemma-4-e4b": ["201,205,760", "7,632,344,064", "the target runs in every step"],
    "dflash-llava15-7b": ["1,095,812,352", "tree product, 9 levels, at most 29 nodes", "DFlash + VATA"],
    "dflash-qwen2.5-vl-7b": ["1,229,499,648", "the target runs in every step", "tree chain, 15 levels"],
    "dflash-qwen3-vl-8b": ["1,048,626,432", "8,767,123,696"],
    "dspark-qwen2.5-vl-7b": ["1,307,363,841", "DSpark, sampled"],
    "dspark-qwen3-vl-8b": ["1,126,426,113", "8,767,123,696"],
    "dspark-llava15-7b": ["1,112,237,569", "DSpark, 30 nodes"],
    "dflash2-qwen3-vl-8b": ["1,169,577,216", "DFlash 2, sampled"],
    "peagle-qwen2.5-vl-7b": ["402,809,344", "tree product, 8 levels, at most 29 nodes", "P-EAGLE + VATA"],
    "specvlm-llava-ov-72b-7b": ["73,181,570,592", "8,030,807,584", "10% of the visual tokens kept", "at most 25 nodes"],
    "specvlm-qwen2.5-vl-72b-7b": ["73,410,777,344", "8,292,166,656"],
    "specvlm-qwen3-vl-235b-8b": ["235,670,022,896", "8,767,123,696"],
    "sage-llava-ov-72b-7b": ["73,181,570,592", "SAGE 0.95: kind pruned; tree sage", "512, 1024, 2048 tokens"],
    "sage-qwen2.5-vl-72b-7b": ["73,410,777,344", "SD-Chain: kind pruned; tree chain, 5 levels"],
    "sage-qwen3-vl-235b-8b": ["235,670,022,896", "SAGE, local threshold"],
    "sage-llama3-8b-1b": ["8,030,261,248", "1,235,814,400", "every visual token kept", "GSM8K, HumanEval"],
}  # fmt: skip


def test_a_text_target_has_its_own_chat_template_where_none_is_named():
    stages = load(["recipe=smollm2/eagle3", "stages.states.format.template=llama3"]).recipe.stages
    templates = {name: stage.format.template for name, stage in stages.items()}
    assert templates == {**dict.fromkeys(["prompts", "answers", "eagle3", "evaluate"], "chat"), "states": "llama3"}
    assert load(["recipe=sage-llama3-8b-1b"]).recipe.stages["evaluate"].format.template == "llama3"
    spelled = load(["recipe=smollm2/eagle3"]).recipe
    again = type(spelled).model_validate(dict(spelled))  # of sections that are there already
    assert again.stages["evaluate"].format.template == "chat"


def test_every_recipe_is_tried():
    assert sorted(EXPECTED) == SHIPPED


@pytest.mark.parametrize("name", EXPECTED)
def test_full_size(name):
    """By the recorded text, which tests/test_goldens.py makes anew."""
    shown = recorded_dry_run(name)
    assert "exit code" not in shown
    for number in EXPECTED[name]:
        assert number in shown


@pytest.mark.parametrize("name", SHIPPED)
def test_headers_say_what_is_whose(name):
    written = (FOLDER / "video" / f"{name}.yaml").read_text()
    header = [line for line in written.splitlines() if line.startswith("#")]
    text = " ".join(header)
    for part in ("Hardware", "Hours: not measured", "Expected", f"recipe={name}", "measured here"):
        assert part in text, part
    assert max(map(len, header)) <= 132
    if name.startswith("sparrow-"):
        assert "second-to-last" in written.split("\nstages:")[0], "which layer the head reads"


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("sage-")])
def test_sages_tables_have_the_printed_algorithm_with_both_thresholds(name):
    """A method beside them that tells growths apart names them; `tree: sage` is algorithm 1."""
    for stage in load([f"recipe={name}"]).recipe.stages.values():
        trees = {n: (m.tree.growth, m.tree.threshold) for n, m in stage.methods.items() if m.tree.kind == "sage"}
        printed = [n.removesuffix(", local threshold") for n, tree in trees.items() if tree == ("template", "local")]
        assert printed and all(trees[n] == ("template", "cumulative") for n in printed), trees
        assert all(("online" in n) == (growth == "online") for n, (growth, _) in trees.items())
        assert {growth for growth, _ in trees.values()} <= {"template", "online"}


def test_schedules_are_the_papers():
    sparrow = load([QWEN]).recipe.stages
    assert [sparrow[name].epochs for name in ("text", "pictures")] == [20, 20]
    assert {sparrow[name].batch_size for name in ("text", "pictures")} == {16}
    text, pictures = (sparrow[name].objective for name in ("text", "pictures"))
    assert (text.feature, text.token, text.listmle, text.mtp_steps) == (1.0, 0.1, 0.01, 0)
    assert (pictures.l1, pictures.listmle, pictures.mtp_steps) == (10.0, 0.1, None)
    asked = {sparrow[name].data.question_end for name in ("answers", "picture_states")}
    assert asked == {"Please answer with at least 1000 words."} and sparrow["answers"].max_new_tokens == 1024
    msd = load(["recipe=msd-qwen2.5-vl-7b"]).recipe.stages
    assert "text" not in msd and msd["pictures"].visual_share == "linear" and msd["pictures"].num_text_epochs == 20
    assert [*msd][:4] == ["text_states", "answers", "picture_states", "pictures"]
    assert [*msd][4:] == ["evaluate", "by_length", "images", "retention"]
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
    share = 0.0 if config.visual(training=False) == "none" else config.held_visual_share
    return share, config.attention_queries, config.trained_visual_share


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


def test_the_ablation_trains_text_once(capsys, tmp_path, monkeypatch):
    """80,760 steps a stage: text, a head from it for each row that differs, and both stages of the other layer."""
    monkeypatch.chdir(tmp_path)
    shown = prints(capsys, ["recipe=sparrow-ablation-qwen2.5-vl-7b", "dry_run=true"])
    steps = [int(found.replace(",", "")) for found in re.findall(r"^  steps ([\d,]+) at batch 16", shown, re.M)]
    assert sum(steps) == (6 + 2) * 80760
    loaded = load(["recipe=sparrow-ablation-qwen2.5-vl-7b"])
    starts = {p.name: p.inputs["drafter"] for p in plan(loaded.recipe, loaded.path) if p.name in HEADS}
    assert starts == dict.fromkeys(HEADS, "text")
    # Heads that are compared are trained and chosen alike.
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


def test_inputs_are_the_stages_that_made_them():
    loaded = load(["recipe=msd-llava-ov-7b"])
    inputs = {p.name: p.inputs for p in plan(loaded.recipe, loaded.path)}
    assert inputs["picture_states"] == {"answers": "answers"}
    assert inputs["pictures"] == {"states/text_states": "text_states", "states/picture_states": "picture_states"}
    assert inputs["evaluate"] == {"drafter/pictures": "pictures"}
    loaded = load([LLAVA])
    inputs = {p.name: p.inputs for p in plan(loaded.recipe, loaded.path)}
    assert inputs["pictures"] == {"states/picture_states": "picture_states", "drafter": "text"}
    loaded = load(["recipe=demo/adapt"])
    drafters = {p.name: p.inputs.get("drafter") for p in plan(loaded.recipe, loaded.path)}
    assert (drafters["fresh_1"], drafters["adapted_1"]) == (None, "old_1"), "named, and not the latest"


def test_a_head_of_another_run_that_was_trained_anew_makes_an_evaluation_stale(tmp_path):
    """Its folder has the same name before and after."""
    made = tmp_path / "draftsmith.json"
    head = f"stages.by_length.methods.MSD={{drafter: {{kind: msd, path: {tmp_path}}}, tree: 48-5-10}}"

    def fingerprint() -> str:
        loaded = load([QWEN, head])
        return {p.name: p.fingerprint for p in plan(loaded.recipe, loaded.path)}["by_length"]

    made.write_text('{"training": {"step": 100}}')
    before = fingerprint()
    assert fingerprint() == before
    made.write_text('{"training": {"step": 200}}')
    assert fingerprint() != before
    method = load([QWEN, head]).recipe.stages["by_length"].methods["MSD"]
    assert method.line(()).startswith(f"kind msd, {tmp_path}; tree "), "of a dry run"


def test_the_llava_family_has_draft_lvlms_and_heads():
    def kind(name: str) -> str | None:
        drafter = load([name]).recipe.drafter
        return drafter and drafter.kind

    assert kind(LLAVA) == "sparrow" and kind("recipe=eagle-llava15-7b") == "eagle"
    assert kind("recipe=llava15-68m") == "lvlm" and kind("recipe=tabed-sweep") is None


BAD = {
    "unknown drafter": (QWEN, ["drafter.kind=sparow"], "did you mean 'sparrow'", "drafter.kind"),
    "a drafter of another track": (QWEN, ["drafter.kind=lvlm"], "no kind of drafter for target qwen2_5_vl", "eagle3"),
    "an image drafter": (LLAVA, ["drafter.kind=llamagen"], "no kind of drafter for target llava_onevision", "kind"),
    "a head for pictures": ("recipe=demo/visual-ar", ["drafter.kind=sparrow"], "for target llamagen", "eagle"),
    "unknown key of a head": (QWEN, ["drafter.vatta=true"], "did you mean 'vata'", "drafter.vatta"),
    "unknown stage": (QWEN, ["stages.text.kind=trane"], "Input tag 'trane'", "stages.text.kind"),
    "a stage of another track": (QWEN, ["stages.text.kind=encode"], "which no qwen2_5_vl reads", "cache"),
    "a captioner": (QWEN, ["stages.text.model=captioner"], "'captioner' is no model", "built as a draft LVLM is"),
    "unknown key of a stage": (QWEN, ["stages.text.epoch=3"], "did you mean 'epochs'", "stages.text.epoch"),
    "unknown key inside a stage": (QWEN, ["stages.text.objective.featur=3"], "did you mean 'feature'", "objective"),
    "unknown key of a target's stage": (
        QWEN, ["stages.text.model=target", "stages.text.trainabel=[projector]"], "did you mean 'trainable'", "trainabel"
    ),
    "a head without its start": (QWEN, ["stages.text.drafter={kind: msd}"], "starts from: scratch", "stages.text"),
    "a drafter that no stage trains": (
        QWEN, ["stages.evaluate.methods.Sparrow.drafter=picturs"], "did you mean 'pictures'", "stages.evaluate"
    ),
    "a stage that trains none": (
        QWEN, ["stages.evaluate.methods.Sparrow.drafter=answers"], "makes none", "stages.evaluate"
    ),
    "unknown tree": (QWEN, ["stages.evaluate.methods.Sparrow.tree=30-4"], "names no tree", "methods.Sparrow.tree"),
    "a tree of images": (
        QWEN, ["stages.evaluate.methods.Sparrow.tree={kind: adt, preset: anole}"], "follows the rows of an image",
        "methods.Sparrow"
    ),
    "samples for a tree that prunes": (
        QWEN, ["stages.evaluate.methods.Sparrow.draw=sample"], "not lossless with draw: sample", "draw: top-k"
    ),
    "unknown key of a method": (QWEN, ["stages.evaluate.methods.Sparrow.vatta=1"], "did you mean 'vata'", "vatta"),
    "unknown key of a drafter of its own": (
        QWEN, ["stages.evaluate.methods.Sparrow.drafter={kind: msd, vatta: 1}"], "did you mean 'vata'",
        "stages.evaluate.methods.Sparrow.drafter.vatta: unknown key",
    ),
    "a sibling of no kind": (
        SPECVLM, ["drafter.model.kind=qwen"], "drafter.model.kind: Input tag 'qwen'", "causal_lm"
    ),
    "a word that is no sibling": (
        SPECVLM, ["drafter.model=tarhet"], "drafter.model: input should be 'target'", "tarhet"
    ),
    "no length": (QWEN, ["stages.evaluate.lengths=[many]"], "no number of visual tokens", "0.5k"),
    "no frames": (QWEN, ["stages.evaluate.lengths=[0]"], "is no number of frames", "frames"),
    "a length twice": (QWEN, ["stages.evaluate.lengths=[16,16]"], "lengths name 16 twice", "stages.evaluate"),
    "a temperature twice": (QWEN, ["stages.evaluate.temperatures=[1.0,1]"], "temperatures name 1.0 twice", "evaluate"),
    "a set that is none": (
        QWEN, ["stages.evaluate.benchmarks.sets.sets=[VideoMM]"], "is no published set", "did you mean"
    ),
    "a set under two names": (
        QWEN, ["stages.images.benchmarks.sets.sets=[SQA,ScienceQA]"], "two benchmarks are called ScienceQA", "images"
    ),
    "letters of a set that is not measured": (
        QWEN, ["stages.evaluate.probes={importance: {sets: [VideoMMEE]}}"], "not among the evaluation's sets", "probes"
    ),
    "letters of descriptions": (
        QWEN, ["stages.evaluate.probes={importance: {sets: [MVBench]}}"], "convention: stock", "probes.importance"
    ),
    "nothing to measure": (QWEN, ["stages.evaluate.benchmarks=null"], "stages.evaluate.benchmarks", "dictionary"),
    "no method": (QWEN, ["stages.evaluate.methods=null"], "stages.evaluate.methods", "evaluate"),
    "a temperature of no method": (
        QWEN, [f"stages.images.methods.{name}.temperatures=[0.0]" for name in ("Sparrow", "Sparrow without VATA")],
        "temperature 1 is used by no method", "stages.images",
    ),
    "states of a drafter without any": (
        "recipe=sage-llama3-8b-1b", ["drafter.ratio=1"], "less than 1", "drafter.ratio"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_told_and_nothing_is_written(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, arguments, *expected = BAD[name]
    message = prints(capsys, [recipe, *arguments, "dry_run=true"], 2)
    for part in expected:
        assert part in message
    assert "hint:" in message and "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["llava15-68m", "llava-ov-160m", "eagle3-llava15-7b", "sparrow-qwen3-vl-8b", "dflash-llava15-7b"]
)
def test_rows_that_need_no_training_stand_beside_the_trained_ones(name):
    recipe = load([f"recipe={name}"]).recipe
    tables = [stage.methods for stage in recipe.stages.values() if stage.kind == "evaluate"]
    kinds = [{getattr(m.drafter, "kind", "") for m in methods.values()} for methods in tables]
    assert any({"ngram", "suffix"} <= found for found in kinds)
