"""One pass of the vision tower for all methods of a request: equal tokens, and its time in each of them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import tiny_qwen
import torch
from draftsmith.core.states import Taps
from draftsmith.eval import loop
from draftsmith.eval.loop import Decoding, embed_once, generate
from draftsmith.eval.policies import CHOICES, Chain, Draw, Static
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.pruned import PrunedConfig, PrunedProposal
from draftsmith.trainers.evaluate.measuring import Measuring
from draftsmith.trainers.evaluate.requests import Opened
from draftsmith.trainers.stages.evaluate import EvaluateStage

KINDS = ["llava", *tiny_qwen.KINDS[1:3]]
GREEDY = Warp()
POLICIES = {"chain": Chain(3), "static": Static(CHOICES["mc_sim_7b_63"])}


def counted(own):
    """The target, whose decoder notes each pass of its tower in `seen`."""
    own.decoder.seen, see = [], own.decoder.see

    def noted(pixels, pictures=()):
        own.decoder.seen.append(len(pixels))
        return see(pixels, pictures)

    own.decoder.see = noted
    return own


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    """A target, a drafter of its family, and two requests with equal ids and other pictures."""
    if request.param == "llava":
        model = tiny.llava(0)
        asked = tiny.request(1, 2)
        return counted(tiny.target(model)), tiny.proposal(tiny.near(model)), asked, other(asked)
    own = counted(tiny_qwen.target(tiny_qwen.model(request.param)))
    asked = tiny_qwen.request(request.param, ((4, 4), (2, 8)), (2, 4, 4), seed=3)
    # The target's own weights after fewer visual tokens: deepstack's states and M-RoPE's positions go with them.
    return own, PrunedProposal(own, own, PrunedConfig(kind="pruned", ratio=0.5)), asked, other(asked)


def other(asked):
    return replace(asked, pixels=asked.pixels.flip(0) + 1)


def decoding(policy, warp=GREEDY):
    return Decoding(policy, Greedy() if warp.greedy else Sampling(), Draw("top-k"), warp, 14, (tiny.EOS,))


@pytest.mark.parametrize("warp", [GREEDY, Warp(1.0)], ids=["greedy", "sampled"])
def test_every_method_says_what_it_says_by_itself(case, warp):
    own, drafter, asked, _ = case
    own.decoder.seen.clear()
    methods = [(None, Chain(1)), *((drafter, policy) for policy in POLICIES.values())]
    answers = {
        name: [
            generate(own, by, asked, decoding(policy, warp), torch.Generator().manual_seed(1), embedded=embedded)
            for by, policy in methods
        ]
        for name, embedded in (("kept", embed_once(own, asked)), ("anew", None))
    }
    assert [a.tokens for a in answers["kept"]] == [a.tokens for a in answers["anew"]]
    shapes = [[[(c.num_nodes, c.num_accepted) for c in a.cycles] for a in each] for each in answers.values()]
    assert shapes[0] == shapes[1]
    assert len(own.decoder.seen) == 1 + len(methods)
    assert sum(c.num_nodes for c in answers["kept"][1].cycles) > 0, "nothing was drafted"


@torch.inference_mode()
def test_nothing_writes_into_what_is_kept(case):
    """The second prefill starts from the same bits as the first: embeddings, deepstack's states, positions."""
    own, _, asked, changed = case
    kept = own.embed_prompt(asked)
    before = [kept.rows.embeds.clone(), kept.rows.positions.clone(), *(part.clone() for part in kept.rows.deepstack)]
    taps = Taps(text_layers=(0, 1), feature=True)
    steps = [own.prefill(asked, taps, capacity=4, embedded=e)[1] for e in (kept, kept, None)]
    for step in steps[1:]:
        assert torch.equal(step.logits, steps[0].logits) and torch.equal(step.feature, steps[0].feature)
        assert torch.equal(step.prompt.positions, steps[0].prompt.positions)
    after = [kept.rows.embeds, kept.rows.positions, *kept.rows.deepstack]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    seen = own.prefill(changed, taps, capacity=4)[1]
    assert torch.equal(asked.ids, changed.ids) and not torch.equal(seen.logits, steps[0].logits)


def test_a_request_with_equal_ids_and_other_pictures_does_not_share(case):
    own, _, asked, changed = case
    with pytest.raises(AssertionError, match="another request, whose pictures may be others"):
        generate(own, None, changed, decoding(Chain(1)), embedded=embed_once(own, asked))


def test_the_target_itself_as_drafter_runs_no_second_tower(case):
    own, _, asked, _ = case
    own.decoder.seen.clear()
    generate(own, PrunedProposal(own, own, PrunedConfig(kind="pruned", ratio=0.5)), asked, decoding(Chain(3)))
    assert len(own.decoder.seen) == 1


def test_what_has_no_picture_is_not_kept():
    own = tiny.target(tiny.llava(0))
    assert embed_once(own, tiny.request(0, 0)) is None
    assert embed_once(None, None) is None  # an image generator's request


# ---- the measuring loop


class Drafting:
    """A method of an evaluation."""

    drafter_name, mode, members = "draft", "M", ("M",)
    method = SimpleNamespace(draw="top-k", visual_skip=None, allowed=lambda t: True)

    def __init__(self, name, drafter):
        self.name, self.drafter, self.policy = name, drafter, POLICIES[name]

    def rule(self, temperature):
        return Greedy()

    def details(self, opened, max_new_tokens):
        return {}


COMMON = {"benchmark": "b", "request": "r", "temperature": 0.0, "max_new_tokens": 10, "medium": "image"}


def measured(own, drafter, requests, tmp_path):
    asks = {"benchmarks": {"b": {"data": {"path": "b"}}}, "methods": {name: {} for name in POLICIES}}
    stage = EvaluateStage(kind="evaluate", max_new_tokens=10, repeats=3, **asks)
    context = SimpleNamespace(seed=3, folder=tmp_path, stop=SimpleNamespace(check=lambda where: None))
    one = Measuring(
        stage, context, own, [Drafting(name, drafter) for name in POLICIES], (tiny.EOS,), tokenizer=object()
    )
    opened = [Opened(asked, None, len(asked.ids), 1) for asked in requests]
    sets = SimpleNamespace(name="b", medium="image", budget="", open=lambda index, target: opened[index])
    one._warm_up(sets, range(len(opened)), one.decodings(0.0, 10), 0.0)
    return [one._rows(n, each, one.decodings(0.0, 10), COMMON, {}) for n, each in enumerate(opened)]


def test_a_measured_request_runs_the_tower_once_for_each_repeat(case, tmp_path):
    """Of three methods and three repeats nine passes before; each request its own, and one request to warm up."""
    own, drafter, asked, changed = case
    own.decoder.seen.clear()
    rows = measured(own, drafter, [asked, changed], tmp_path)
    assert len(own.decoder.seen) == 1 + 2 * 3
    plain = [generate(own, None, r, replace(decoding(Chain(1)), max_new_tokens=10)).tokens for r in (asked, changed)]
    assert [list(row.tokens) for each in rows for row in each] == [tokens for tokens in plain for _ in range(3)]


def test_every_method_is_charged_for_the_tower_alike(monkeypatch, tmp_path):
    """A clock that only the tower moves: its time is in each prefill and each whole, and in no cycle."""
    own, seconds = tiny.target(tiny.llava(0)), [0.0]
    see = own.decoder.see
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))

    def slow(pixels, pictures=()):
        seconds[0] += 5.0
        return see(pixels, pictures)

    own.decoder.see = slow
    (rows,) = measured(own, tiny.proposal(tiny.near(own.decoder.model)), [tiny.request(1, 1)], tmp_path)
    assert len(rows) == 3
    for row in rows:
        # The draft has a tower of its own, which does not move this clock.
        assert (row.plain_prefill_s, row.plain_total_s, row.prefill_s, row.total_s) == (5.0, 5.0, 5.0, 5.0)
        assert (row.plain_cycle_s, row.cycle_s, row.draft_s, row.parts_s["others"]) == (0.0, 0.0, 0.0, 0.0)
        assert row.parts_s["target_prefill"] == 5.0
