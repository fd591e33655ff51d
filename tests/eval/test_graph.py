"""The captured chain's function, without a capture here, proposes what the ordinary draft proposes."""

import pytest
import torch
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.ensemble import preset
from draftsmith.models.drafters.graph import GraphedChain
from recorded_graphs import recorded  # noqa: F401  a fixture
from test_ensemble import SUBSTITUTES, ensemble
from tiny import llava, near, proposal, request, target


def graphed(model, mode="M", gamma=4, capacity=96, **more):
    config = preset(mode) if isinstance(mode, str) else mode
    members, weights = config.members, config.weights.build(len(config.members))
    settings = {"newline_id": 5, "gamma": gamma, "capacity": capacity} | more
    return GraphedChain(target(model).decoder, members, weights, **settings)


def cycles(big, drafter, asked, warp, rule, seed=0, gamma=4):
    decoding = Decoding(Chain(gamma), rule, Draw("top-k"), warp, 18, ())
    result = generate(big, drafter, asked, decoding, torch.Generator().manual_seed(seed))
    return result.tokens, [(c.num_drafted, c.num_accepted) for c in result.cycles]


@pytest.mark.parametrize("mode", ["M", "P", "T"])
@pytest.mark.parametrize(("warp", "rule"), [(Warp(), Greedy()), (Warp(1.0, top_k=20), Sampling())])
def test_it_proposes_what_the_ordinary_draft_proposes(mode, warp, rule):
    big = llava(0)
    draft = near(big)
    chain = graphed(draft, mode)
    accepted = 0
    for seed in range(3):  # the buffers are used again from request to request
        asked = request(seed, images=seed)
        result = cycles(target(big), chain, asked, warp, rule)
        assert result == cycles(target(big), proposal(draft, mode), asked, warp, rule)
        accepted += sum(a for _, a in result[1])
    assert accepted > 0


def test_a_copy_is_accepted_whole():
    big = llava(0)
    _, result = cycles(target(big), graphed(llava(0)), request(1, 2), Warp(), Greedy())
    assert all(drafted == accepted for drafted, accepted in result)


def test_it_does_not_branch():
    chain = graphed(llava(0))
    chain.start(request(0, 1), None, Warp(), capacity=20)
    chain.begin(7)
    first = chain.root().argmax()[None]
    chain.expand([-1], first)
    with pytest.raises(AssertionError, match="cannot branch"):
        chain.expand([-1], first)


@pytest.mark.parametrize("name", ["MT*", "MTCP*"])
@pytest.mark.parametrize(("warp", "rule"), [(Warp(), Greedy()), (Warp(1.0, top_k=20), Sampling())])
def test_an_ensemble_in_one_graph(name, warp, rule):
    """Rows, their padding and the adapting weights, over requests of other lengths, and larger buffers on the way."""
    big = llava(0)
    draft, config = near(big), preset(name)
    chain = graphed(draft, config, capacity=30, substitutes=SUBSTITUTES)
    used = []
    for seed in (1, 0, 3, 2):
        asked = request(seed, images=seed)
        result = cycles(target(big), chain, asked, warp, rule)
        plain = ensemble(draft, config)
        assert result == cycles(target(big), plain, asked, warp, rule)
        # Without a picture the modes are the same, and rounding chooses among equal weights.
        assert seed == 0 or torch.allclose(chain.weights.current, plain.weights.current, atol=1e-5)
        used.append(tuple(chain.weights.current.tolist()))
    assert len(set(used)) > 1 and chain.capacity > 30


def test_a_recorded_chain(recorded):  # noqa: F811
    """And nothing is captured for a request like one before."""
    big = llava(0)
    draft, config = near(big), preset("MT*")
    chain = graphed(draft, config, gamma=2, substitutes=SUBSTITUTES)
    for seed in (1, 2, 1):
        captured, asked = len(chain.graphs.captured), request(seed, images=seed)
        expected = cycles(target(big), ensemble(draft, config), asked, Warp(), Greedy(), gamma=2)
        assert cycles(target(big), chain, asked, Warp(), Greedy(), gamma=2) == expected
    assert captured == len(chain.graphs.captured) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["M", "MT*"])
def test_captured(name):
    """On CUDA the same through replayed graphs."""
    big = llava(0).cuda()
    draft, config = near(big), preset(name)
    chain = graphed(draft, config, substitutes=SUBSTITUTES)
    for seed in range(4):
        asked = request(seed, images=1)
        expected = cycles(target(big), ensemble(draft, config), asked, Warp(), Greedy())
        assert cycles(target(big), chain, asked, Warp(), Greedy()) == expected
    assert len(chain.graphs.captured) > 1
