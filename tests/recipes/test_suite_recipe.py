"""The sweep of published drafts over targets: it loads, is whole, and says at full size what it would do."""

import pytest
from draftsmith.recipes.config.load import load


@pytest.fixture
def stages():
    return load(["recipe=tabed-sweep"]).recipe.stages


def test_every_pair_is_measured_alike(stages):
    """Targets, drafts, methods, trees and lengths stand in the recorded dry run; here is what it does not show."""
    for stage in stages.values():
        for name, method in stage.methods.items():
            assert method.names == [*stage.drafters] and method.rule.kind == "exact"
            assert method.mode is None if name == "M" else method.mode.name == name
        suite = stage.benchmarks["suite"]
        assert (suite.convention, suite.transcript) == ("released", "released")
        # As released: no system sentence, and NeXT without its tiles.
        assert stage.format.system == "" and stage.format.image_join == "hf"
        assert stage.target.anyres is (False if "next" in stage.target.kind else None)
        # Figures 3 and 4: weights over time of the ensembles, on requests of every set.
        assert stage.record_weights == 2


def test_precisions_are_the_released_ones(stages):
    """float16 for drafts and targets; the 160M draft was released for bfloat16 everywhere."""
    for name, stage in stages.items():
        wanted = "bfloat16" if name.endswith("_bf16") else "float16"
        assert stage.target.dtype == wanted
        assert {draft.dtype for draft in stage.drafters.values()} == ({wanted} if wanted == "bfloat16" else {None})
