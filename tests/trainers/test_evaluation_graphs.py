"""An evaluation's `graphs`: by themselves on a GPU, off where they cannot be; `pretend_cuda` runs captures."""

from types import SimpleNamespace

import pytest
import torch
from draftsmith.core import ranks
from draftsmith.core.errors import UserError
from draftsmith.eval import loop
from draftsmith.eval.pair import Pair
from draftsmith.models.decoding.captured import PassGraphs
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.beside import capture_seconds
from draftsmith.recipes.load import load
from draftsmith.trainers.evaluate.drafters import Drafters
from draftsmith.trainers.evaluate.graphs import about_graphs, capture_heads, capture_target
from draftsmith.trainers.evaluate.methods import GraphsConfig
from fails import fails_with
from test_head_decoding import loud_head, settings_of
from tiny import llava, target


def on_gpu(big):
    """The target as if it were on a GPU."""
    big.__class__ = type("OnGpu", (big.__class__,), {"device": torch.device("cuda")})
    return big


def test_on_a_cpu_nothing_happens_and_nothing_is_said(capsys):
    big = target(llava(0, layers=6))
    one, _, drafting = heads_of(big)
    for value in ("auto", False):
        config = GraphsConfig(target=value, head=value)
        capture_target(config, big, drafting, 100, stage="evaluate")
        capture_heads(config, big, drafting, 100, stage="evaluate")
        assert big.graphs is None and one.graphs is None and about_graphs(config, big, drafting) == {}
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("part", "capture"), [("target", capture_target), ("head", capture_heads)])
def test_true_is_refused_where_they_cannot_be(part, capture):
    big = target(llava(0, layers=6))
    with pytest.raises(UserError, match="cannot be CUDA graphs: the target is on a CPU") as refused:
        capture(GraphsConfig(**{part: True}), big, heads_of(big)[2], 100, stage="evaluate")
    assert f"key stages.evaluate.graphs.{part}" in str(refused.value) and "write auto" in str(refused.value)


def test_a_gpu_s_target_that_cannot_be_captured_says_so_in_a_line(capsys, monkeypatch):
    """One for the target, and one for heads; without a head there is none for them."""
    big = target(llava(0, layers=6))
    *_, drafting = heads_of(on_gpu(big))
    for module in ("trainers.evaluate.graphs", "models.drafters.head_graphs"):
        monkeypatch.setattr(f"draftsmith.{module}.why_not", lambda target: "of its kernels")
    for some in (drafting, drafting[2:]):
        capture_target(GraphsConfig(), big, some, 100, stage="compare")
        capture_heads(GraphsConfig(), big, some, 100, stage="compare")
        target_line, *others = capsys.readouterr().err.splitlines()
        assert "passes of the target run eagerly, without CUDA graphs: of its kernels" in target_line
        assert "stages.compare.graphs.target=false" in target_line and len(others) == (some is drafting)
    assert about_graphs(GraphsConfig(), big, drafting) == {
        "graphs of the target": "off: of its kernels",
        "graphs of heads": "off: of its kernels; no head with levels: chain",
    }
    assert about_graphs(GraphsConfig(target=False, head=False), big, drafting) == {}


def test_one_rank_that_cannot_capture_keeps_all_from_it(monkeypatch):
    """Ranks are asked, and not taken to be alike."""
    monkeypatch.setattr("draftsmith.trainers.evaluate.graphs.why_not", lambda decoder: None)
    monkeypatch.setattr(ranks, "gather", lambda why: [why, "its kernels are others"])
    big = target(llava(0))
    capture_target(GraphsConfig(), big, (), 100, stage="evaluate")
    assert big.graphs is None
    said = about_graphs(GraphsConfig(head=False), on_gpu(big))
    assert said == {"graphs of the target": "off: another rank cannot capture them"}
    fails_with("its kernels are others", capture_target, GraphsConfig(target=True), big, (), 100, stage="evaluate")


def test_their_length_is_the_longest_request_or_what_is_asked_for(monkeypatch):
    monkeypatch.setattr("draftsmith.trainers.evaluate.graphs.why_not", lambda decoder: None)
    big, drafting = target(llava(0)), [SimpleNamespace(policy=SimpleNamespace(max_nodes=60))]
    for config, last in ((GraphsConfig(), 768), (GraphsConfig(target=True, length=1500), 2048)):
        capture_target(config, big, drafting, 500, stage="evaluate")
        assert isinstance(big.graphs, PassGraphs) and big.graphs.lengths[-1] == last
    capture_target(GraphsConfig(target=False), big, drafting, 500, stage="evaluate")
    assert big.graphs is None, "of an evaluation before"


def test_chains_of_drafts_are_no_graphs_where_nobody_wants_them():
    for value in (True, False):
        stage = load(["recipe=demo/lvlm", "output=out", f"stages.evaluate.graphs.draft={value}".lower()])
        stage = stage.recipe.stages["evaluate"]
        context = SimpleNamespace(target=stage.benchmarks and load(["recipe=demo/lvlm", "output=out"]).recipe.target)
        method = next(method for method in stage.methods.values() if method.chain is not None)
        options = Drafters(stage, context, Pair(None, TargetIdentity({})))._options(method, method.policy())
        assert (options.chain is not None) is value


def heads_of(big):
    """An evaluation's methods: a head, an ensemble with one, and plain chains of a draft."""
    policy, config = SimpleNamespace(max_nodes=60), settings_of("eagle3")
    head = loud_head(config, big)
    one, member = config.drafter(head, big), config.drafter(head, big)
    mixed = SimpleNamespace(members=[member, SimpleNamespace()])
    drafters = {"EAGLE-3": one, "mixed": mixed, "chain": SimpleNamespace(members=("M", "T"))}
    return one, member, [SimpleNamespace(title=n, drafter=d, policy=policy) for n, d in drafters.items()]


def test_heads_have_graphs_where_they_can_be_and_the_report_says_so(monkeypatch):
    big = target(llava(0, layers=6))
    one, member, drafting = heads_of(big)
    monkeypatch.setattr("draftsmith.models.drafters.head_graphs.why_not", lambda target: None)
    capture_heads(GraphsConfig(), big, drafting, 500, stage="evaluate")
    assert one.graphs.lengths[-1] == member.graphs.lengths[-1] == 768 and one.graphs is not member.graphs
    only_heads = GraphsConfig(target=False)
    said = about_graphs(only_heads, on_gpu(big), drafting)["graphs of heads"]
    none = "0 captured in 0.0 s, 0 passes replayed"
    assert said == f"on rank 0, EAGLE-3: {none}; mixed: {none}; no head with levels: chain"
    assert about_graphs(only_heads, big, drafting[2:]) == {"graphs of heads": "off; no head with levels: chain"}
    monkeypatch.setattr(ranks, "gather", lambda failed: [failed, False, True, True])
    assert about_graphs(only_heads, big, drafting)["graphs of heads"].count("a capture failed on rank 2, 3") == 1
    capture_heads(GraphsConfig(head=False), big, drafting, 500, stage="evaluate")
    assert one.graphs is None and member.graphs is None, "of an evaluation before"


def test_captures_are_no_part_of_a_request_s_time(monkeypatch):
    """Neither the target's nor those of a drafter or of the members of an ensemble."""
    big = target(llava(0, layers=6))
    monkeypatch.setattr("draftsmith.models.drafters.head_graphs.why_not", lambda target: None)
    one, member, drafting = heads_of(big)
    capture_heads(GraphsConfig(), big, drafting, 500, stage="evaluate")
    big.graphs = PassGraphs(big.device, (64,), (8,), big.decoder.new_cache)
    for graphs, seconds in ((one.graphs, 1.0), (member.graphs, 2.0), (big.graphs, 4.0)):
        graphs.seconds = seconds
    assert [capture_seconds(part) for part in (big, *(some.drafter for some in drafting), None)] == [4, 1, 2, 0, 0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: 100.0))
    on_gpu(big)
    assert loop._clock(big, drafting[1].drafter)() == 94.0


def test_left_alone_they_are_no_part_of_an_evaluations_settings():
    """Evaluations that finished before there were graphs stay finished."""
    for setting, named in (("draft=true", False), ("head=auto", False), ("draft=false", True), ("head=false", True)):
        loaded = load(["recipe=demo/lvlm", "output=out", f"stages.evaluate.graphs.{setting}"])
        assert ("graphs" in loaded.recipe.stages["evaluate"].model_dump(mode="json")) is named
    loaded = load(["recipe=demo/lvlm", "output=out", "stages.evaluate.graphs.target=true"])
    written = loaded.recipe.stages["evaluate"].model_dump(mode="json")["graphs"]
    assert written == {"draft": True, "target": True, "length": None}, "what was asked for, and not what came of it"
