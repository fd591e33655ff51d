"""The sweep of published drafts over targets: it loads, is whole, and says at full size what it would do."""

import pytest
from draftsmith.recipes.config.load import load

TARGETS = {"llava15_7b": "llava-hf/llava-1.5-7b-hf", "llava15_13b": "llava-hf/llava-1.5-13b-hf",
           "next_7b": "llava-hf/llava-v1.6-vicuna-7b-hf", "next_13b": "llava-hf/llava-v1.6-vicuna-13b-hf"}  # fmt: skip
BF16 = "1.5-160M"
DRAFTS = {"1.5-68M": "mjbooo/lvlm68m", "1.5-160M": "mjbooo/lvlm160m-bf16", "OV-68M": "mjbooo/lvlm68m-ov"}


@pytest.fixture
def stages():
    return load(["recipe=tabed-sweep"]).recipe.stages


def test_every_pair_is_measured_alike(stages):
    released = {name: path for name, path in DRAFTS.items() if name != BF16}
    assert {name: stage.target.path for name, stage in stages.items()} == TARGETS | {
        f"{name}_bf16": path for name, path in TARGETS.items()
    }
    for stage_name, stage in stages.items():
        drafts = {BF16: DRAFTS[BF16]} if stage_name.endswith("_bf16") else released
        assert {name: draft.path for name, draft in stage.drafters.items()} == drafts
        assert list(stage.methods) == ["M", "T", "C", "P", "MT", "MT*", "MTCP", "MTCP*"]
        for name, method in stage.methods.items():
            assert method.names == [*drafts] and (method.mode is None if name == "M" else method.mode.name == name)
            assert (method.tree.kind, method.tree.gamma, method.rule.kind) == ("chain", 5, "exact")
        assert (stage.max_new_tokens, stage.temperatures) == ([128], [0.0])
        suite = stage.benchmarks["suite"]
        assert suite.data.path == "hub" and suite.turns == 2
        assert (suite.convention, suite.transcript) == ("released", "released")
        # As released: no system sentence, and NeXT without its tiles.
        assert stage.format.system == "" and stage.format.image_join == "hf"
        assert stage.target.anyres is (False if "next" in stage.target.kind else None)
        # Figures 3 and 4: weights over time of the ensembles, on requests of every set.
        assert stage.record_weights == 2
    pairs = {(draft, stage.target.path) for stage in stages.values() for draft in stage.drafters}
    assert pairs == {(draft, target) for draft in DRAFTS for target in TARGETS.values()} and len(pairs) == 12


def test_precisions_are_the_released_ones(stages):
    """float16 for drafts and targets; the 160M draft was released for bfloat16 everywhere."""
    for name, stage in stages.items():
        wanted = "bfloat16" if name.endswith("_bf16") else "float16"
        assert stage.target.dtype == wanted
        assert {draft.dtype for draft in stage.drafters.values()} == ({wanted} if wanted == "bfloat16" else {None})
