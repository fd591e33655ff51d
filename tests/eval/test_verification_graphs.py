"""The captured verification's function, without a capture here, gives what the ordinary pass gives."""

import pytest
import tiny_qwen
import torch
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.captured import PassGraphs
from draftsmith.models.decoding.tree import Tree, no_tree
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.verification import lengths_up_to, why_not
from recorded_graphs import recorded  # noqa: F401  a fixture
from test_head_decoding import loud_head, settings_of
from tiny import llava, near, proposal, request, target

LENGTHS, NODES = (48, 64, 96), (1, 8, 24)


def graphed(big, lengths=LENGTHS):
    big.graphs = PassGraphs(big.device, lengths, NODES, big.decoder.new_cache)
    return big


def said(big, drafter, policy, asked, temperature, length=24):
    rule = Sampling() if temperature else Greedy()
    decoding = Decoding(policy, rule, Draw("top-k"), Warp(temperature), length, ())
    result = generate(big, drafter, asked, decoding, torch.Generator().manual_seed(3))
    return result.tokens, [(c.num_nodes, c.num_accepted) for c in result.cycles]


def cases():
    big = llava(0, layers=6)
    head = loud_head(settings_of("eagle3"), target(big))
    yield "plain", big, lambda _: None, Chain(4)
    yield "chain", big, lambda _: proposal(near(big)), Chain(4)
    yield "tree", big, lambda t: settings_of("eagle3").drafter(head, t), Dynamic(total=16, depth=3, width=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_says_what_eager_passes_say(temperature):
    """Over requests of other lengths, in one pair of buffers; buckets change inside an answer."""
    lengths = set()
    for name, big, drafter, policy in cases():
        plain, ours = target(big), graphed(target(big))
        for seed in range(3):
            asked = request(seed, images=seed % 2)
            expected = said(plain, drafter(plain), policy, asked, temperature)
            assert said(ours, drafter(ours), policy, asked, temperature) == expected, name
        graphs = ours.graphs
        assert graphs.num_replayed > 20 and graphs.num_eager == 0
        lengths |= {key[0][0] for key in graphs.captured}
    assert len(lengths) > 1


def test_recorded_passes_say_what_eager_passes_say(recorded):  # noqa: F811
    """And nothing is captured for a request like one before."""
    _, big, drafter, policy = list(cases())[-1]
    plain, ours = target(big), graphed(target(big), (64,))
    for seed in (1, 2, 1):
        captured = len(ours.graphs.captured)
        asked = request(seed, images=seed % 2)
        assert said(ours, drafter(ours), policy, asked, 1.0, 6) == said(plain, drafter(plain), policy, asked, 1.0, 6)
    assert captured == len(ours.graphs.captured) > 0 and ours.graphs.num_eager == 0


def test_what_a_pass_returns_outlives_the_next_ones(recorded):  # noqa: F811
    ours = graphed(target(llava(0)))
    session, _ = ours.prefill(request(1, 1), Taps(feature=True), capacity=20)
    first = ours.verify(session, 7, no_tree())
    before = first.logits.clone(), first.feature.clone()
    ours.verify(session, 9, no_tree())
    assert torch.equal(first.logits, before[0]) and torch.equal(first.feature, before[1])


def test_positions_in_three_coordinates():
    model = tiny_qwen.model("qwen2_5_vl")
    plain, ours = tiny_qwen.target(model), graphed(tiny_qwen.target(model), (64, 96, 128))
    asked = tiny_qwen.request("qwen2_5_vl")
    tree = Tree(torch.tensor([7, 8, 9, 10]), (-1, -1, 0, 2), (-1,) * 4)
    logits = []
    for big in (plain, ours):
        session, step = big.prefill(asked, Taps(feature=True, text_layers=(1,)), capacity=40)
        assert session.rope_delta != 0
        some = [step.logits]
        for path in ([0, 2], [1], []):
            step = big.verify(session, 7, tree)
            some += [step.logits, step.feature[0], step.layers[1][0]]
            big.commit(session, path)
        logits.append(torch.cat([part.flatten() for part in some]))
    torch.testing.assert_close(*logits)
    assert ours.graphs.num_replayed == 3


def test_an_earlier_request_cannot_go_on_behind_a_later_one():
    ours = graphed(target(llava(0)))
    first, _ = ours.prefill(request(1, 1), Taps(), capacity=20)
    later, _ = ours.prefill(request(2, 0), Taps(), capacity=20)
    with pytest.raises(RuntimeError, match="one request decodes at a time"):
        ours.verify(first, 7, no_tree())
    assert not ours.verify(later, 7, no_tree()).logits.isnan().any()


def test_nothing_of_a_former_request_is_left():
    """A mask hides what a place held, but not a NaN."""
    ours, plain = graphed(target(llava(0))), target(llava(0))
    asked, taps = request(1, 1), Taps()
    session, _ = ours.prefill(asked, taps, capacity=20)
    with torch.inference_mode():
        for layer in session.cache.own_layers:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
    assert ours.verify(session, 7, no_tree()).logits.isnan().any(), "else this test could not fail"
    short = request(2, 0)
    logits = []
    for big in (plain, ours):
        session, _ = big.prefill(short, taps, capacity=20)
        logits.append(big.verify(session, 7, no_tree()).logits)
    torch.testing.assert_close(*logits)


def test_what_no_graph_holds_is_run_eagerly_and_counted():
    big, asked = llava(0), request(1, 1)
    plain, ours = target(big), graphed(target(big), (48,))
    long = said(plain, None, Chain(4), asked, 0.0, length=60)
    assert said(ours, None, Chain(4), asked, 0.0, length=60) == long
    assert (ours.graphs.num_replayed, ours.graphs.num_eager) == (0, 59)
    assert "59 eager (longer than 48 places, more than 24 nodes, or layers are hooked)" in ours.graphs.summary
    tree = Tree(torch.arange(5, 35), (-1,) * 30, (-1,) * 30)
    ours = graphed(target(big))
    steps = []
    for one in (plain, ours):
        session, _ = one.prefill(asked, Taps(), capacity=40)
        steps.append(one.verify(session, 7, tree).logits)
    assert torch.equal(*steps) and (ours.graphs.num_replayed, ours.graphs.num_eager) == (0, 1)


def test_where_it_cannot_be():
    assert why_not(target(llava(0)).decoder) == "the target is on a CPU"
    experts = tiny_qwen.target(tiny_qwen.model("qwen3_vl_moe")).decoder
    experts.__class__ = type("OnGpu", (experts.__class__,), {"device": torch.device("cuda")})
    assert "mixture of experts" in (why_not(experts) or "")
    whole = target(llava(0)).decoder
    whole.__class__ = type("OnGpu", (whole.__class__,), {"device": torch.device("cuda")})
    assert why_not(whole) is None
    for kind in ("dynamic", "longrope"):
        whole.language_model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        assert why_not(whole) == f"rotations are {kind}, which the host computes anew as positions grow"
    whole.language_model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    assert why_not(whole) is None
    weight = whole.model.lm_head.weight
    weight.full_tensor = lambda: weight  # as a DTensor has it, whose parts lie with several ranks
    assert why_not(whole) == "several ranks hold the target together"
    del weight.full_tensor
    whole.language_model.config._attn_implementation = "flash_attention_2"
    assert "takes no mask" in (why_not(whole) or "")


def test_lengths():
    assert lengths_up_to(1000) == (256, 384, 512, 768, 1024)
    assert lengths_up_to(10) == (256,)
