"""A target whose activations overflow is refused by the request's name, however it is decoded; good ones do not change.

The weights are finite: what is loaded is checked elsewhere.
"""

import math
from functools import partial

import pytest
import torch
from draftsmith.core.batch import ImageRequest
from draftsmith.core.finite import NotFinite
from draftsmith.eval.block import Block
from draftsmith.eval.lantern import LanternConfig
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import RULES, Codes
from draftsmith.models.decoding.batched import draw_pictures, write_answers
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.targets.llava.model import LlavaDecoder
from tiny import IMAGE_ID, llava, num_tokens, request, self_draft, target
from visual_tiny import anole, llamagen
from visual_tiny import request as image_request
from visual_tiny import target as image_target

ASKED = request(3, images=1, words=5)
NEAR = LanternConfig(kind="lantern", k=3, delta=0.2)
CODEBOOK = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
WAYS = {
    "greedy": (Warp(), RULES["greedy"], Draw("top-k")),
    "sampling": (Warp(1.0, 20, 0.9), RULES["sampling"], Draw("sample")),
    "lantern": (Warp(), NEAR.build_for_codes(0.0, Codes(CODEBOOK)), Draw("top-k")),
    "lantern, sampling": (Warp(1.0), NEAR.build_for_codes(1.0, Codes(CODEBOOK)), Draw("sample")),
    "block": (Warp(1.0), Block(), Draw("sample")),
}


def bad_from(head: torch.nn.Module, call: int, value: float, rows: slice = slice(None)):
    """From its `call`-th pass on, the scores [...,R,V] of a head hold `value` at one id of `rows`."""
    passes = [0]

    def spoil(module, inputs, scores):
        passes[0] += 1
        if passes[0] >= call:
            scores = scores.clone()
            scores[..., rows, 9] = value
        return scores

    return head.register_forward_hook(spoil)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize(("call", "value"), [(1, math.nan), (1, math.inf), (3, math.nan), (3, math.inf)])
def test_generate_refuses_scores_that_are_not_finite(way, drafts, call, value):
    model = llava(4)
    drafter = self_draft(model) if drafts else None
    warp, rule, draw = WAYS[way]
    decoding = Decoding(Chain(3), rule, draw, warp, 12, ())
    generator = torch.Generator().manual_seed(0)
    before = generate(target(model), drafter, ASKED, decoding, generator).tokens
    bad_from(model.lm_head, call, value)
    with pytest.raises(NotFinite, match=r"the scores .* are not finite") as caught:
        generate(target(model), drafter, ASKED, decoding, generator.manual_seed(0))
    emitted = int(str(caught.value.where).removeprefix("request r3, token "))
    assert (emitted == 0) == (call == 1) and emitted < len(before)


def test_a_target_that_overflows_by_itself():
    model = llava(4)
    model.lm_head.weight.data = model.lm_head.weight.data.sign() * 3e38
    assert model.lm_head.weight.isfinite().all()
    with pytest.raises(NotFinite, match="request r3, token 0"):
        generate(target(model), None, ASKED, Decoding(Chain(1), RULES["greedy"], Draw("top-k"), Warp(), 4, ()))


@pytest.mark.parametrize("warp", [Warp(), Warp(1.0, 20, 0.9)], ids=["greedy", "sampled"])
def test_answers_written_side_by_side_name_the_request(warp):
    model, asked = llava(4), [request(n, images=0, words=4) for n in range(3)]
    decoder = LlavaDecoder(model, num_token_ids=num_tokens(model), never=(IMAGE_ID,))
    written = partial(write_answers, decoder, asked, warp, seeds=[0, 1, 2], eos_ids=())
    before = [answer.ids for answer in written(limits=[6, 3, 6])]
    hook = bad_from(model.lm_head, 4, math.nan, slice(1, 2))
    # Its answer has ended by then, and what a row after its end says does not count.
    assert [answer.ids for answer in written(limits=[6, 3, 6])] == before
    hook.remove()
    bad_from(model.lm_head, 3, math.nan, slice(1, 2))
    with pytest.raises(NotFinite, match=r"request r1, token 2"):
        written(limits=[6, 3, 6])


@pytest.mark.parametrize("warp", [Warp(), Warp(1.0, 8)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["llamagen", "anole"])
def test_pictures_drawn_side_by_side_name_the_request(kind, warp):
    if kind == "anole":
        model, head = (found := anole()), found.model.lm_head
        asked = [ImageRequest(torch.tensor([24 + seed, 30]), name=f"r{seed}") for seed in range(3)]
    else:
        model = image_target(found := llamagen(), 2.0)
        head, asked = found.output, [image_request(found, seed) for seed in range(3)]
    draw_pictures(model, asked, warp, seeds=[0, 1, 2])
    hook = bad_from(head, 5, math.nan, slice(2, 3))  # the third picture's row with its condition
    with pytest.raises(NotFinite, match="request r2, token 4"):
        draw_pictures(model, asked, warp, seeds=[0, 1, 2])
    hook.remove()
    bad_from(head, 1, math.nan)
    decoding = Decoding(Chain(1), RULES["greedy" if warp.greedy else "sampling"], Draw("top-k"), warp, 16, ())
    with pytest.raises(NotFinite, match="request r0, token 0"):
        generate(model, None, asked[0], decoding, torch.Generator().manual_seed(0))
