"""Passes as CUDA graphs, without a GPU: padded inputs give what eager passes give, and recordings of them do.

A recording of torch.fx repeats operations on the tensors that they had, as a CUDA graph does: whatever else a captured
function read, a number on the host, another request's tensor, stays as it was. Reading a value on the host raises.
"""

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import tiny_qwen
import torch
from draftsmith.eval import loop
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Static
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.tree import Tree, no_tree
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.beside import capture_seconds
from draftsmith.models.fast import cuda_graphs as module
from draftsmith.models.fast.cuda_graphs import Graphs, lengths_up_to
from draftsmith.models.targets.base import Taps
from draftsmith.recipes.config.load import load
from draftsmith.trainers.evaluate.text import about_graphs, capture, why_not
from test_head_decoding import loud_head, settings_of
from tiny import llava, near, proposal, request, target
from torch.fx.experimental.proxy_tensor import make_fx

TREE = Dynamic(total=16, depth=3, width=4)
STATIC = Static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
CPU = torch.device("cpu")


@pytest.fixture(params=["padded", "recorded"])
def form(request, monkeypatch):
    """How passes run: as they are over padded inputs, or as they were recorded when they first came."""
    monkeypatch.setattr(module, "lengths_up_to", lambda capacity: (32, 48, 64, 96, 128, 224, 288))
    if request.param == "recorded":

        def record(self, run, inputs):
            recording = make_fx(lambda *values: run(*values))(*(value.clone() for value in inputs))
            assert not [n for n in recording.graph.nodes if "lift_fresh" in str(n.target)], "a capture does not upload"
            return recording

        monkeypatch.setattr(Graphs, "_capture", record)
    return request.param


def graphed(part, make_cache=None):
    part.graphs = Graphs(CPU, 100, make_cache or partial(Cache, 1))
    return part


def graphed_target(model):
    big = target(model)
    graphed(big.decoder, big.decoder.new_cache)
    return big


def said(big, drafter, policy, asked, temperature=0.0, length=16):
    decoding = Decoding(policy, Sampling() if temperature else Greedy(), Draw("top-k"), Warp(temperature), length, ())
    result = generate(big, drafter, asked, decoding, torch.Generator().manual_seed(3))
    return result.tokens, [(c.num_nodes, c.num_accepted) for c in result.cycles]


@pytest.mark.covering
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("drafts", "policy"), [("plain", Chain(4)), ("chain", Chain(4)), ("eagle3", TREE)])
def test_a_target_and_a_draft_say_what_eager_passes_say(drafts, policy, temperature, form):
    """Over requests of other lengths, in one pair of buffers; sizes change inside an answer."""
    model = llava(0, layers=6)
    plain, ours = target(model), graphed_target(model)
    head = loud_head(settings_of("eagle3"), plain)

    def drafter(big):
        if drafts == "chain":
            draft = proposal(near(model))
            if big is ours:
                graphed(draft.decoder, draft.decoder.new_cache)
            return draft
        return settings_of("eagle3").drafter(head, big) if drafts == "eagle3" else None

    for seed in range(2 if form == "recorded" else 3):
        asked = request(seed, images=seed % 2)
        drafting = drafter(ours)
        expected = said(plain, drafter(plain), policy, asked, temperature)
        assert said(ours, drafting, policy, asked, temperature) == expected
        if drafts == "chain":
            assert drafting.graphs.num_replayed > 4 and drafting.graphs.num_eager == 0
    assert ours.decoder.graphs.num_replayed > 8 and ours.decoder.graphs.num_eager == 0


@pytest.mark.parametrize(
    ("kind", "policy", "temperature"),
    [("eagle3", TREE, 1.0), ("eagle3", Chain(4), 0.0), ("eagle", STATIC, 1.0), ("sparrow", TREE, 0.7),
     ("msd", Chain(4), 1.0), ("hivis", STATIC, 0.0)],
)  # fmt: skip
def test_heads_propose_what_eager_passes_propose(kind, policy, temperature, form):
    big, config = target(llava(0, layers=6)), settings_of(kind)
    head = loud_head(config, big).double()  # what rounds grows from level to level
    eager, ours = config.drafter(head, big), graphed(config.drafter(head, big))
    assert ours.captures
    for seed in range(2 if form == "recorded" else 3):
        asked = request(seed, images=(seed + 1) % 2)
        assert said(big, ours, policy, asked, temperature) == said(big, eager, policy, asked, temperature)
    assert ours.graphs.num_replayed > 16 and ours.graphs.num_eager == 0


def test_positions_in_three_coordinates(form):
    model = tiny_qwen.model("qwen2_5_vl")
    plain, ours = tiny_qwen.target(model), tiny_qwen.target(model)
    graphed(ours.decoder, ours.decoder.new_cache)
    tree, logits = Tree(torch.tensor([7, 8, 9, 10]), (-1, -1, 0, 2), (-1,) * 4), []
    for big in (plain, ours):
        session, step = big.prefill(
            tiny_qwen.request("qwen2_5_vl"), Taps(feature=True, text_layers=(0, 1)), capacity=40
        )
        assert session.rope_delta != 0
        some = [step.logits]
        for path in ([0, 2], [1], []):
            step = big.verify(session, 7, tree)
            some += [step.logits, step.feature[0], *(step.layers[n][0] for n in (0, 1))]
            big.commit(session, path)
        logits.append(torch.cat([part.flatten() for part in some]))
    torch.testing.assert_close(*logits)
    assert ours.decoder.graphs.num_replayed == 3


def test_what_a_pass_returns_outlives_the_next_ones(form):
    ours = graphed_target(llava(0))
    session, _ = ours.prefill(request(1, 1), Taps(feature=True), capacity=20)
    first = ours.verify(session, 7, no_tree())
    before = first.logits.clone(), first.feature.clone()
    ours.verify(session, 9, no_tree())
    assert torch.equal(first.logits, before[0]) and torch.equal(first.feature, before[1])


def test_an_earlier_request_cannot_go_on_behind_a_later_one():
    ours = graphed_target(llava(0))
    first, _ = ours.prefill(request(1, 1), Taps(), capacity=20)
    later, _ = ours.prefill(request(2, 0), Taps(), capacity=20)
    with pytest.raises(RuntimeError, match="one request decodes at a time"):
        ours.verify(first, 7, no_tree())
    assert not ours.verify(later, 7, no_tree()).logits.isnan().any()


def test_nothing_of_a_former_request_is_left():
    """A mask hides what a place held, but not a NaN."""
    ours, plain = graphed_target(llava(0)), target(llava(0))
    session, _ = ours.prefill(request(1, 1), Taps(), capacity=20)
    with torch.inference_mode():
        for layer in session.cache.kv_layers:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
    assert ours.verify(session, 7, no_tree()).logits.isnan().any(), "else this test could not fail"
    sessions = [(big, big.prefill(request(2, 0), Taps(), capacity=20)[0]) for big in (plain, ours)]
    torch.testing.assert_close(*(big.verify(session, 7, no_tree()).logits for big, session in sessions))


def test_a_request_that_is_too_long_runs_eagerly_and_is_counted(monkeypatch):
    monkeypatch.setattr(module, "lengths_up_to", lambda capacity: (140,))
    model = llava(0)
    ours = graphed_target(model)
    assert said(ours, None, Chain(4), request(1, 1)) == said(target(model), None, Chain(4), request(1, 1))
    assert (ours.decoder.graphs.num_replayed, ours.decoder.graphs.num_eager) == (0, 15)


def test_a_capture_that_breaks_off_leaves_eager_passes_and_one_line(monkeypatch, capsys):
    streams = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "before")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def broken(*_, **__):
        raise RuntimeError("CUDA error: operation not permitted\nand more lines")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", broken)
    model, asked = llava(0), request(1, 1)
    ours = target(model)
    ours.decoder.graphs = graphs = Graphs(torch.device("cuda"), 100, ours.decoder.new_cache)
    run = lambda value: (value + 1,)  # noqa: E731
    assert graphs._capture(run, (torch.ones(1),)) is run and streams == ["before"]
    assert "not permitted" in graphs.failure and graphs.seconds > 0 and "off since" in graphs.summary
    assert capsys.readouterr().err.count("passes run eagerly from here on") == 1
    assert not graphs.take(graphs.new_cache(10), 1)
    assert said(ours, None, Chain(4), asked) == said(target(model), None, Chain(4), asked)


def on_gpu(decoder):
    decoder.__class__ = type("OnGpu", (decoder.__class__,), {"device": torch.device("cuda")})
    return decoder


def test_where_they_cannot_be():
    whole = target(llava(0)).decoder
    assert why_not(whole) == "the model is on no GPU"
    on_gpu(whole)
    assert why_not(whole) is None
    config, weight = whole.language_model.config, whole.model.lm_head.weight
    for kind in ("dynamic", "longrope"):
        config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        assert why_not(whole) == "rotations grow with positions"
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    assert why_not(whole) is None
    weight.full_tensor = lambda: weight  # as a DTensor has it, whose parts lie with several ranks
    assert "several ranks" in why_not(whole)
    del weight.full_tensor
    config._attn_implementation = "flash_attention_2"
    assert why_not(whole) == "attention takes no mask"
    assert "mixture of experts" in why_not(on_gpu(tiny_qwen.target(tiny_qwen.model("qwen3_vl_moe")).decoder))


def test_lengths():
    assert lengths_up_to(1000) == (256, 512, 1024) and lengths_up_to(10) == (256,)
    assert lengths_up_to(512)[-1] == 512 and lengths_up_to(513)[-1] == 1024


def test_an_evaluation_has_them_on_a_gpu_and_says_so(monkeypatch):
    """Of the target, a head, an ensemble's member and a draft; and captures are no part of a request's time."""
    big, config, policy = target(llava(0, layers=6)), settings_of("eagle3"), SimpleNamespace(max_nodes=60)
    one, member = (config.drafter(loud_head(config, big), big) for _ in range(2))
    draft, mixed = proposal(near(llava(0))), SimpleNamespace(members=[member, SimpleNamespace()])
    drafters = {"EAGLE-3": one, "mixed": mixed, "draft": draft}
    drafting = [SimpleNamespace(title=name, drafter=one, policy=policy) for name, one in drafters.items()]
    capture(True, big, drafting, 500)
    parts = big.decoder, one, member, draft.decoder
    assert [part.graphs for part in parts] == [None] * 4 and about_graphs(big, drafting) == {}, "on a CPU"
    for decoder in (big.decoder, draft.decoder):
        on_gpu(decoder)
    big.__class__ = type("OnGpu", (big.__class__,), {"device": torch.device("cuda")})
    capture(True, big, drafting, 500)
    assert [part.graphs.lengths[-1] for part in parts] == [1024] * 4
    none = "0 captured in 0.0 s, 0 passes replayed, 0 eager"
    said = "; ".join(f"{name}: {none}" for name in ("the target", "EAGLE-3", "mixed", "draft"))
    assert about_graphs(big, drafting) == {"CUDA graphs": said}
    for part, seconds in zip(parts, (1.0, 2.0, 4.0, 8.0), strict=True):
        part.graphs.seconds = seconds
    assert [capture_seconds(part) for part in (big, *drafters.values(), None)] == [1, 2, 4, 8, 0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: 100.0))
    assert loop._clock(big, mixed)() == 95.0
    capture(False, big, drafting, 500)
    assert [part.graphs for part in parts] == [None] * 4 and about_graphs(big, drafting)["CUDA graphs"].count(
        "off"
    ) == 4


@pytest.mark.parametrize(("key", "usual"), [("graphs", True), ("identical", False)])
def test_left_alone_they_are_no_part_of_an_evaluations_settings(key, usual):
    """Evaluations that finished before there were graphs, or `identical`, stay finished."""
    for value in (True, False):
        loaded = load(["recipe=demo/lvlm", "output=out", f"stages.evaluate.{key}={value}".lower()])
        assert (key in loaded.recipe.stages["evaluate"].model_dump(mode="json")) is (value != usual)
