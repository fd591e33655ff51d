"""What a stage is for: the recipe's words or its kind's, in dry runs, and in no fingerprint."""

import pytest
from command_line import prints
from draftsmith.recipes.config.files import demo_names
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan


@pytest.mark.parametrize("name", demo_names())
def test_every_stage_of_a_demo_says_what_it_is_for(name):
    stages = load([f"recipe=demo/{name}"]).recipe.stages
    assert [stage for stage, section in stages.items() if section.about is None] == []


def test_without_words_a_stage_has_its_kinds():
    publish = "stages.publish={kind: publish, repo: me/x}"
    recipes = (["llava15-68m", publish], ["eagle-llamagen-xl-stage1"], ["sparrow-qwen2.5-vl-7b"],
               ["demo/lvlm-distilled"])  # fmt: skip
    purposes = {}
    for name, *words in recipes:
        loaded = load([f"recipe={name}", *words])
        stages = {stage: section.model_copy(update={"about": None}) for stage, section in loaded.recipe.stages.items()}
        for planned in plan(loaded.recipe.model_copy(update={"stages": stages}), loaded.path):
            purposes.setdefault(planned.stage.kind, set()).add(planned.purpose)
    assert purposes.keys() == {"generate", "train", "regenerate", "encode", "cache", "evaluate", "publish"}
    assert all(map(all, purposes.values())) and "trains the drafter: projector" in purposes["train"]


def test_a_dry_run_shows_it_and_no_fingerprint_holds_it(capsys):
    said = prints(capsys, ["recipe=demo/lvlm", "dry_run=true", "stages.pretrain.about=a bridge for pictures"])
    assert "stage pretrain (train): a bridge for pictures\n" in said
    loaded = [
        load(["recipe=demo/lvlm", *words]) for words in ([], ["stages.world.about=null", "stages.pretrain.about=b"])
    ]
    one, other = ([(p.fingerprint, p.settings) for p in plan(one.recipe, one.path)] for one in loaded)
    assert one == other
