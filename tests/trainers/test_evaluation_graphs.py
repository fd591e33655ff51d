"""An evaluation's `graphs`: off where they cannot be, and the report says so."""

from types import SimpleNamespace

from draftsmith.models.targets.verification import VerificationGraphs
from draftsmith.recipes.load import load
from draftsmith.trainers.evaluation.drafters import Drafters
from draftsmith.trainers.evaluation.graphs import GraphsConfig, about_graphs, capture_target
from tiny import llava, target


def test_on_a_cpu_they_are_off_and_the_report_says_so():
    big = target(llava(0))
    capture_target(GraphsConfig(target=True), big, (), 100)
    assert big.graphs is None
    assert about_graphs(GraphsConfig(target=True), big) == {"graphs of the target": "off: the target is on a CPU"}
    assert about_graphs(GraphsConfig(), big) == {}, "nobody asked for them"


def test_their_length_is_the_longest_request_or_what_is_asked_for(monkeypatch):
    monkeypatch.setattr("draftsmith.trainers.evaluation.graphs.why_not", lambda decoder: None)
    big, drafting = target(llava(0)), [SimpleNamespace(policy=SimpleNamespace(max_nodes=60))]
    for config, last in ((GraphsConfig(target=True), 768), (GraphsConfig(target=True, length=1500), 2048)):
        capture_target(config, big, drafting, 500)
        assert isinstance(big.graphs, VerificationGraphs) and big.graphs.lengths[-1] == last
    capture_target(GraphsConfig(), big, drafting, 500)
    assert big.graphs is None, "of an evaluation before"


def test_chains_of_drafts_are_no_graphs_where_nobody_wants_them():
    for value in (True, False):
        stage = load(["recipe=demo/lvlm", "output=out", f"stages.evaluate.graphs.draft={value}".lower()])
        stage = stage.recipe.stages["evaluate"]
        context = SimpleNamespace(target=stage.benchmarks and load(["recipe=demo/lvlm", "output=out"]).recipe.target)
        method = next(method for method in stage.methods.values() if method.chain is not None)
        options = Drafters(stage, context, None)._options(method, method.policy())
        assert (options.chain is not None) is value


def test_left_alone_they_are_no_part_of_an_evaluations_settings():
    """Evaluations that finished before there were graphs stay finished."""
    for setting, named in (("draft=true", False), ("draft=false", True), ("target=true", True)):
        loaded = load(["recipe=demo/lvlm", "output=out", f"stages.evaluate.graphs.{setting}"])
        assert ("graphs" in loaded.recipe.stages["evaluate"].model_dump(mode="json")) is named
