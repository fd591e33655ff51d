"""Targets with recurrent layers (Qwen3.5): a state is rolled back exactly, and what cannot be exact is refused.

What they share with other Qwen-VLs is in `test_qwen.py`: transformers' scores, trees as single forwards, self-drafts.
"""

import copy
from dataclasses import replace

import family_checks as family
import pytest
import tiny_qwen
import torch
from draftsmith.core.errors import UserError
from draftsmith.core.states import Taps
from draftsmith.eval.policies import Chain, Static
from draftsmith.models.decoding.tree import Tree
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.drafters.sparrow import SparrowConfig
from draftsmith.models.targets.qwen35.decoder import HybridDecoder
from draftsmith.models.targets.qwen35.recurrent import HybridCache
from draftsmith.trainers.evaluate.text import why_not

MODEL = tiny_qwen.model("qwen3_5")
TREE = Tree(torch.tensor([11, 12, 13, 14, 15, 16]), (-1, -1, 0, 0, 2, 4), (0,) * 6)
NOTHING = Tree(torch.empty(0, dtype=torch.int64), (), ())
BUSH = [(0,), (1,), (0, 0), (0, 1), (1, 0)]


def asked(seed: int = 5, words: int = 70):
    """Longer than a chunk of the delta rule."""
    return tiny_qwen.request("qwen3_5", ((4, 4), (2, 8)), (5, 4, 4), seed=seed, words=words)


def states(session) -> list[torch.Tensor]:
    """Of every layer: the committed part."""
    cache = session.cache
    assert isinstance(cache, HybridCache) and len(cache.recurrent) == 3 and len(cache.kv_layers) == 1
    parts = [part for layer in cache.recurrent for part in (layer.state, layer.inputs[:, : layer.window])]
    layers = cache.kv_layers
    return parts + [part[:, :, : cache.length] for layer in layers for part in (layer.keys, layer.values)]


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_rolled_back_state_is_that_of_plain_decoding(chunk):
    """After every acceptance: none, some and all of a chain's and of a tree's nodes."""
    own = tiny_qwen.target(copy.deepcopy(MODEL).double(), prefill_chunk=chunk)
    request = asked()
    request = replace(request, pixels=request.pixels.double())
    session, _ = own.prefill(request, Taps(), capacity=40)
    plain, _ = own.prefill(request, Taps(), capacity=40)
    chain = Tree(torch.tensor([21, 22, 23, 24]), (-1, 0, 1, 2), (0,) * 4)
    for root, tree, path in [
        (9, TREE, [0, 2, 4, 5]), (10, chain, []), (11, chain, [0, 1]), (12, TREE, [1]), (13, TREE, [0, 3]),
        (14, chain, [0, 1, 2, 3]), (15, TREE, []), (16, NOTHING, []),
    ]:  # fmt: skip
        before = [part.clone() for part in states(session)]
        own.verify(session, root, tree)
        own.commit(session, path)
        for token in [root, *(int(tree.tokens[node]) for node in path)]:
            own.verify(plain, token, NOTHING)
            own.commit(plain, [])
        assert session.cache.length == plain.cache.length
        for ours, theirs in zip(states(session), states(plain), strict=True):
            # transformers norms in float32 whatever the weights are: rounding of that size enters each layer.
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        moved = [(a - b).abs().max() for a, b in zip(states(session)[:6], before[:6], strict=True)]
        assert all(difference > 1e-3 for difference in moved), "else this test could not fail"


def test_nothing_is_kept_of_rejected_nodes():
    """Three passes over trees that all fail leave the state bit for bit as it was but for the roots."""
    own, request = tiny_qwen.target(MODEL), asked()
    sessions = [own.prefill(request, Taps(), capacity=60)[0] for _ in range(2)]
    for number in range(3):
        other = Tree(TREE.tokens + 20 * number, TREE.parents, TREE.expansions)
        for session, tree in zip(sessions, (TREE, other), strict=True):
            own.verify(session, 9 + number, tree)
            own.commit(session, [])
    for one, two in zip(*map(states, sessions), strict=True):
        assert torch.equal(one, two)


def test_a_state_does_not_go_back():
    own = tiny_qwen.target(MODEL)
    session, _ = own.prefill(asked(), Taps(), capacity=10)
    with pytest.raises(AssertionError, match="cannot go back"):
        session.cache.crop_to(session.cache.length - 1)
    with torch.inference_mode():
        session.cache.empty()
    assert session.cache.length == 0 and all(layer.state is None for layer in session.cache.recurrent)


def test_transformers_refuses_what_is_done_here():
    """Assisted decoding of the same model: the reason that there is a cache of ours."""
    request = asked(words=4)
    given = tiny_qwen.published("qwen3_5", request)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        MODEL.generate(**given, assistant_model=copy.deepcopy(MODEL), max_new_tokens=4, do_sample=False)


@pytest.mark.slow  # about 40 seconds; the default tier has the exact comparison with the step recurrence
@pytest.mark.parametrize(("policy", "draw"), [(Chain(3), "sample"), (Static(BUSH), "sample"), (Static(BUSH), "top-k")])
def test_a_draw_of_many_is_distributed_as_the_target(policy, draw):
    """Three tokens, by chains and trees."""
    torch.manual_seed(1)
    near = copy.deepcopy(MODEL)
    for weight in near.parameters():
        weight.data += 0.03 * torch.randn_like(weight)
    drafter = IndependentProposal(tiny_qwen.target(near).decoder, "M", newline_id=7)
    request = asked(seed=2, words=5)
    family.check_draws(tiny_qwen.target(MODEL), drafter, request, policy, draw=draw, tokens=3, top_k=3, count=300)


# ---- what is refused, with the reason


def test_attention_of_a_layer_that_recurs():
    own = tiny_qwen.target(MODEL)
    with pytest.raises(UserError, match="attention of layer 1 is wanted, which recurs") as refused:
        own.prefill(asked(), Taps(prefill_attention=(1, 3)), capacity=1)
    assert "layers that attend: [3]" in str(refused.value)
    shape = own.shape
    taps = SparrowConfig(kind="sparrow", vata=False, visual_share=0.5).taps_for(shape, training=False)
    assert taps.prefill_attention == (3,)
    with pytest.raises(UserError, match="share_layer is 2, and the target's layers with attention"):
        SparrowConfig(kind="sparrow", vata=False, visual_share=0.5, share_layer=2).taps_for(shape, training=False)


def test_graphs():
    """That tokens cannot be hidden from layers is in test_visual_tokens.py."""
    decoder = copy.copy(tiny_qwen.target(MODEL).decoder)
    decoder.__class__ = type("OnGpu", (HybridDecoder,), {"device": torch.device("cuda")})
    assert "recurrent layers" in (why_not(decoder) or "")


def test_sections():
    with pytest.raises(ValueError, match="recurrent layers read weights beside their modules"):
        tiny_qwen.section("qwen3_5", path="Qwen/Qwen3.5-9B", device_map="auto", offload="cpu")
    with pytest.raises(UserError, match=r"turns 0\.5 of each attention head"):
        Eagle3Config(kind="eagle3", positions="mrope", taps=(1, 2, 3)).check(tiny_qwen.target(MODEL).shape)
    experts = tiny_qwen.target(tiny_qwen.model("qwen3_5_moe")).shape
    with pytest.raises(UserError, match="has experts alone") as refused:
        Eagle3Config(kind="eagle3", taps=(1, 2, 3)).check(experts)
    assert "drafter.intermediate_size" in str(refused.value)
    Eagle3Config(kind="eagle3", taps=(1, 2, 3), intermediate_size=48).check(experts)
