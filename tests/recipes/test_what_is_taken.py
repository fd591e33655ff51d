"""Which of several earlier stages' results a stage takes where it names none: of all shipped recipes, and planted."""

from types import SimpleNamespace

import pytest
import yaml
from draftsmith.core.errors import UserError
from draftsmith.recipes.commands.cli import COMMANDS
from draftsmith.recipes.config.files import recipe_names
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.publish.lineage import data_of, finished, trained_by
from draftsmith.trainers.stages.publish import PublishStage
from draftsmith.trainers.train.settings import trained_drafter
from fails import fails_with

LVLM = ("llava-ov-160m", "llava-ov-68m", "llava-ov-68m-anyres", "llava15-160m", "llava15-160m-distilled",
        "llava15-68m", "llava15-68m-distilled")  # fmt: skip
SEEDED = ("draft", "eagle3", "dflash", "medusa", "msd")
EMOJI = (*SEEDED, "dspark", "eagle", "vispec", "sparrow", "hivis")
SEEDS = dict.fromkeys(("draft_68", "draft_135", "eagle3_150", "eagle3_300"), "curve") | {
    f"{name}_{seed}": "seeds" for name in SEEDED for seed in (1, 2)}  # fmt: skip
# Recipe -> the evaluation that the card of its drafters takes; drafter -> evaluation where they differ.
TAKEN: dict[str, str | dict[str, str]] = {
    **{f"demo/{name}": "evaluate" for name in (
        "adapt", "compare", "dflash", "lvlm", "lvlm-from-nothing", "lvlm-ov", "sage", "video", "visual-ar",
        "visual-ar-blocks", "visual-ar-textures",
    )},
    "demo/lvlm-distilled": "compare",
    "demo/lvlm-seeds": "seeds",
    "compare-served": dict.fromkeys(
        ("draft", "draft_headless", "draft_projected", "eagle", "eagle3", "half_blind", "vispec", "hivis", "peagle",
         "dflash", "dspark", "dflash2"), "evaluate") | dict.fromkeys(
        ("draft_served", "msd", "medusa", "sparrow"), "ours"),
    # The suite measures one of the drafts.
    "demo/suite": {"onevision": "suite", "single_only": "evaluate", "few_onevision": "evaluate",
                   "few_single_only": "evaluate"},
    **dict.fromkeys((*LVLM, "llava15-68m-served"), "evaluate"),
    "demo/emoji-vlm-full": {name: "evaluate" if name == "eagle3" else f"measure_{name}" for name in EMOJI},
    "emoji_vlm/picture": {name: "need_picture" if name in ("draft", "eagle3", "dflash") else f"measure_{name}"
                          for name in EMOJI},
    "emoji_vlm/seeds": {name: "seeds" if name in SEEDED else f"measure_{name}" for name in EMOJI} | SEEDS,
    "emoji_vlm/exact": dict.fromkeys(EMOJI, "exact") | SEEDS,
    **dict.fromkeys(("demo/emoji-vlm", "demo/smollm2", "demo/smollm2-full", "smollm2/dflash", "smollm2/eagle3",
                     "smollm2/medusa", "smollm2/served"),
                    "evaluate"),
    "smollm2/minutes": "chains",
    "smollm2/taps": "taps",
    **dict.fromkeys(("adapt-eagle3-qwen2.5-vl-7b", "dflash-llava15-7b", "dspark-llava15-7b", "eagle-llava15-7b",
                     "eagle3-llava15-7b"), "evaluate"),
    **dict.fromkeys(("dflash-qwen2.5-vl-7b", "dflash-qwen3-vl-8b", "dflash2-qwen3-vl-8b",
                     "dspark-qwen2.5-vl-7b", "dspark-qwen3-vl-8b", "eagle3-gemma-4-e4b", "eagle3-internvl3-8b",
                     "eagle3-mistral-small-3.1-24b", "eagle3-qwen2.5-vl-7b", "eagle3-qwen3.5-9b",
                     "mtp-qwen3.5-9b", "peagle-qwen2.5-vl-7b"), "chains"),
    **dict.fromkeys(("hivis-llava-ov-7b", "msd-llava-ov-7b", "vispec-llava-ov-7b"), "by_length"),
    **dict.fromkeys(("hivis-qwen2.5-vl-7b", "sparrow-qwen2.5-vl-7b", "sparrow-qwen3-vl-8b", "vispec-qwen2.5-vl-7b"),
                    "images"),
    "msd-qwen2.5-vl-7b": "retention",
    "sparrow-llava-ov-7b": "layers",
    "sparrow-ablation-qwen2.5-vl-7b": {"pictures": "layers", "base": "ablation", "mtp": "ablation", "half": "shares",
                                       "blind": "shares", "second": "ablation"},
    **dict.fromkeys(("dflash-anole-7b", "dflash-llamagen-xl", "dspark-llamagen-xl", "eagle-anole-7b",
                     "eagle-llamagen-c2i-3b", "eagle-llamagen-c2i-l", "eagle-llamagen-c2i-xl",
                     "eagle-llamagen-xl-stage1-200k", "medusa-llamagen-3b"), "evaluate"),
    # Behind these stands an evaluation that times nothing.
    **dict.fromkeys(("eagle-llamagen-xl-stage1", "eagle-llamagen-xl-stage2"), "evaluate"),
    **dict.fromkeys(("lanternpp-anole-7b", "lanternpp-llamagen-xl-stage1"), "lanternpp"),
    "lantern-settings-llamagen-xl-stage1": "settings",
}  # fmt: skip


@pytest.mark.parametrize("name", recipe_names())
def test_the_evaluation_of_each_shipped_recipes_cards(name):
    """The latest that is timed and has a row of the drafter."""
    loaded = load([f"recipe={name}"])
    stages = loaded.recipe.stages
    drafters = finished(loaded.recipe.model_dump(mode="json", by_alias=True)["stages"])
    if not drafters:
        assert name not in TAKEN
        return
    publish = {
        f"of_{drafter}": PublishStage.model_validate({"kind": "publish", "from": drafter}) for drafter in drafters
    }
    planned = plan(loaded.recipe.model_copy(update={"stages": {**stages, **publish}}), loaded.path)
    taken = {p.inputs["drafter"]: p.inputs["report"] for p in planned if p.stage.kind == "publish"}
    expected = TAKEN[name]
    assert taken == (expected if isinstance(expected, dict) else dict.fromkeys(drafters, expected))
    timed = [n for n, stage in stages.items() if stage.kind == "evaluate" and stage.is_timed]
    assert set(taken.values()) <= set(timed)


def planned(*settings: str, recipe: str = "demo/visual-ar") -> dict:
    loaded = load([f"recipe={recipe}", *settings])
    return {p.name: p for p in plan(loaded.recipe, loaded.path)}


def test_one_of_several_finished_drafters_must_be_named():
    """The latest was published: of demo/visual-ar the head without dropout, which is there to be compared with."""
    caught = fails_with(r"head \(one of 2 finished drafters\)", planned, "stages.publish={kind: publish}")
    assert "stages.publish" in caught.key and "from=STAGE" in caught.hint
    assert planned("stages.publish={kind: publish, from: head}")["publish"].inputs["drafter"] == "head"
    lvlm = planned("stages.publish={kind: publish}", recipe="demo/lvlm")["publish"]
    assert lvlm.inputs["drafter"] == "finetune", "language and pretrain were trained on"


def test_an_evaluation_that_cannot_go_with_the_drafter_is_refused_by_name():
    for report, why in (("quality", "measures no speed"), ("evaluate", "measures no drafter of stage 'head'")):
        with pytest.raises(UserError, match=why) as caught:
            planned(
                "stages.evaluate.methods=null", "stages.evaluate.contrasts={}",
                "stages.evaluate.methods={other: {drafter: head_without_dropout}, relaxed: {drafter: head, rule: "
                "{kind: lantern, k: 8, delta: 0.2}}}",
                "stages.quality={kind: evaluate, methods: {a: {drafter: head}}, benchmarks: {drawn: {reader: true, "
                "untimed: {}, prompts: {from: world, path: test-00000.tar, max_samples: 2}}}}",
                f"stages.publish={{kind: publish, from: head, report: {report}}}",
            )  # fmt: skip
        assert caught.value.where and caught.value.hint


def test_no_evaluation_that_fits_is_refused_with_the_reason_of_each():
    settings = ["stages.evaluate.methods=null", "stages.evaluate.contrasts={}",
                "stages.evaluate.methods={other: {drafter: head_without_dropout}}"]  # fmt: skip
    with pytest.raises(UserError, match=r"needs a report.*evaluate \(measures no drafter of stage 'head'") as caught:
        planned(*settings, "stages.publish={kind: publish, from: head}")
    assert "methods: {NAME: {drafter: STAGE}}" in caught.value.hint


STEPS = "steps: 1, batch_size: 2, optim: {lr: 0.1}"
OTHER = f"{{kind: train, drafter: {{kind: medusa}}, from: scratch, data: {{from: features}}, {STEPS}}}"
DRAWN = "benchmarks: {drawn: {prompts: {from: world, path: test-00000.tar, max_samples: 2}}}"


def test_a_method_without_drafter_takes_the_recipes_own():
    """It took the latest that any stage had trained, of another kind, too, under the recipe's name."""
    settings = [f"stages.medusa={OTHER}", f"stages.again={{kind: evaluate, methods: {{a: {{}}}}, {DRAWN}}}"]
    assert planned(*settings)["again"].inputs["drafter"] == "head_without_dropout"
    first = "world, pictures, vq, reader, codes, target, features"
    order = f"order=[{first}, medusa, again, head, head_without_dropout, evaluate]"
    caught = fails_with(r"medusa \(trains a drafter of its own, of kind medusa", planned, *settings, order)
    assert "methods: {NAME: {drafter: STAGE}}" in caught.hint


def test_a_stage_without_from_trains_on_the_recipes_own_drafter():
    """Started from weights of another kind, which the loader refused hours later; the card's lineage followed."""
    more = "stages.more={kind: train, data: {from: features}, steps: 1, batch_size: 2, optim: {lr: 0.1}}"
    loaded = load(["recipe=demo/visual-ar", f"stages.medusa={OTHER}", more])
    by_name = {p.name: p for p in plan(loaded.recipe, loaded.path)}
    assert by_name["more"].inputs["drafter"] == "head_without_dropout"
    assert trained_by(loaded.tree["stages"], "more") == ["head_without_dropout", "more"]


def of_compare(*settings):
    loaded = load(["recipe=demo/compare", *settings])
    return loaded.recipe.stages, {p.name: p for p in plan(loaded.recipe, loaded.path)}


def test_a_draft_lvlm_of_its_own_is_trained_beside_the_recipes():
    """Heads had that alone: the costs of a draft's options could not stand in one table."""
    stages, by_name = of_compare()
    assert trained_drafter(by_name["draft_headless"]).first_token is False
    assert trained_drafter(by_name["draft"]).first_token is True
    assert by_name["draft"].inputs["drafter"] == "align"
    assert stages["draft_projected"].drafter.projector_input == "projected"


@pytest.mark.parametrize(("setting", "message", "hint"), [
    ("stages.align_headless.from=language", "'language', which trains a drafter with other settings",
     "language_headless"),
    ("stages.later={kind: train, trainable: [projector], data: {from: world, path: single}, steps: 1, "
     "batch_size: 2, optim: {lr: 0.1}, from: draft_headless}",
     "'draft_headless', which trains a drafter with other settings", "draft"),
    ("stages.draft_headless.from=null", "a drafter of its own starts from: scratch", ""),
    ("stages.target.drafter={kind: eagle}", "drafter: this stage trains the target", "leave it out"),
])  # fmt: skip
def test_weights_of_another_draft_lvlm_are_refused(setting, message, hint):
    """A folder's draft reads what it was built to read, whatever the stage's section says."""
    caught = fails_with(message, of_compare, setting)
    assert hint in (caught.hint or "")


def test_shards_without_what_a_model_reads_are_passed_over():
    """Pixels that were encoded last went to heads, and codes to an image tokenizer."""
    pixels = "{kind: encode, from: world, source: {kind: webdataset, path: 'train-*.tar'}, write: [pixels]}"
    head = "{kind: train, from: scratch, data: {}, steps: 1, batch_size: 2, optim: {lr: 0.1}}"
    made = planned(f"stages.later={pixels}", f"stages.third={head}")
    assert made["third"].inputs["codes"] == "features"
    with pytest.raises(UserError, match="takes its codes from 'later', which writes pixels and no codes or features"):
        planned(f"stages.later={pixels}", f"stages.third={head}", "stages.third.data.from=later")
    stages = load(["recipe=demo/visual-ar", f"stages.later={pixels}", f"stages.third={head}"]).tree["stages"]
    assert data_of(stages, "third") == data_of(stages, "head")


def test_what_belongs_to_a_target_comes_with_it(tmp_path):
    """A tokenizer of pictures that was trained after the target's codes were written read them as noise."""
    vq = "{kind: train, model: vq, data: {from: pictures}, from: scratch, steps: 1, batch_size: 2, optim: {lr: 0.1}}"
    again = f"{{kind: evaluate, methods: {{a: {{drafter: head}}}}, {DRAWN}}}"
    made = planned(f"stages.vq_2={vq}", f"stages.again={again}")
    assert made["again"].inputs["vq"] == "vq" and made["again"].inputs["text"] == "target"


def test_a_publication_opens_the_target_that_its_evaluation_measured(tmp_path):
    """A target that a later stage trained was stored with the drafter of the one before."""
    tuned = ("{kind: train, model: target, trainable: [language_model], data: {from: world, path: train, "
             "max_length: 64}, steps: 1, batch_size: 2, optim: {lr: 0.1}}")  # fmt: skip
    made = planned(f"stages.tuned={tuned}", "stages.publish={kind: publish}", recipe="demo/lvlm-from-nothing")
    assert made["tuned"].inputs["target"] == "target"
    assert made["publish"].inputs["target"] == "target" and made["publish"].inputs["processor"] == "world"


def test_an_evaluation_of_another_target_brings_it_along():
    """The folder's prompt was decoded with the target that the run trained, and its manifest named the other."""
    other = ("{kind: evaluate, target: {kind: llava, path: some/llava}, methods: {a: {drafter: finetune}}, "
             "benchmarks: {seen: {data: {from: world, path: seen, max_length: 64}}}}")  # fmt: skip
    made = planned(f"stages.other={other}", "stages.publish={kind: publish}", recipe="demo/lvlm")["publish"]
    assert made.inputs == {"drafter": "finetune", "report": "other"}


def test_one_of_several_publishing_stages_must_be_named(tmp_path):
    """`draftsmith publish RUN repo=...` changed the last of them."""
    stages = {"a": {"kind": "publish", "repo": "me/a"}, "b": {"kind": "publish", "repo": "me/b"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"stages": stages}))
    with pytest.raises(UserError, match="publishes in 2 stages, a, b") as caught:
        COMMANDS["publish"].run(SimpleNamespace(name=str(tmp_path), settings=[]))
    assert caught.value.where == str(tmp_path / "recipe.yaml") and "stages=[b]" in caught.value.hint


@pytest.mark.parametrize("name", recipe_names())
def test_no_two_stages_train_the_same_weights(name):
    """Whatever the run's seed: a stage without one of its own beside stages of seeds 1 and 2 would be one of them."""
    stages = load([f"recipe={name}"]).recipe.stages
    trained = [stage for stage in stages.values() if stage.kind == "train"]
    for seed in (0, 1, 2):
        made = [
            (one.model_dump_json(exclude={"about", "seed"}), seed if one.seed is None else one.seed) for one in trained
        ]
        assert len({*made}) == len(made), f"a run of seed {seed} has the same drafter twice"
