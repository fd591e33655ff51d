"""The captured functions of a head's passes, without a capture here, give what eager passes give."""

from functools import partial

import pytest
import tiny_qwen
import torch
import visual_tiny
from draftsmith.core.batch import ImageRequest
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Static
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.captured import PassGraphs
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.head_graphs import why_not
from draftsmith.models.drafters.mixed import MixedProposal
from draftsmith.models.drafters.weights import FixedWeights
from draftsmith.models.targets.llamagen.target import LlamaGenTarget
from recorded_graphs import recorded  # noqa: F401  a fixture
from test_head_decoding import loud_head, settings_of
from tiny import llava, request, target

LENGTHS, COUNTS = tuple(range(16, 160, 24)), (1, 4, 8)
STATIC = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
TREE = Dynamic(total=16, depth=3, width=4)


def graphed(drafter, lengths=LENGTHS, counts=COUNTS):
    drafter.graphs = PassGraphs(torch.device("cpu"), lengths, counts, partial(Cache, 1))
    return drafter


class Heard:
    """A drafter whose distributions are kept."""

    def __init__(self, drafter):
        self.drafter, self.taps, self.max_levels, self.q = drafter, drafter.taps, drafter.max_levels, []

    def root(self):
        self.q.append(self.drafter.root()[None])
        return self.q[-1][0]

    def expand(self, parents, tokens):
        self.q.append(self.drafter.expand(parents, tokens))
        return self.q[-1]

    def __getattr__(self, name):
        return getattr(self.drafter, name)


def said(big, drafter, policy, asked, temperature, length=20, draw="top-k"):
    """Tokens and cycles of an answer, and what was proposed."""
    drafter, rule = Heard(drafter), Sampling() if temperature else Greedy()
    decoding = Decoding(policy, rule, Draw(draw), Warp(temperature), length, ())
    result = generate(big, drafter, asked, decoding, torch.Generator().manual_seed(3))
    return (result.tokens, [(c.num_nodes, c.num_accepted) for c in result.cycles]), torch.cat(drafter.q)


def check(big, eager, ours, asked, policy=TREE, temperature=0.0, **more):
    """Both answer and propose alike."""
    (expected, q), (heard, proposed) = (said(big, one, policy, asked, temperature, **more) for one in (eager, ours))
    assert heard == expected
    torch.testing.assert_close(proposed, q)


def pair(big, config, *graphs):
    """A drafter without graphs and one with, of a head in float64: what rounds grows from level to level."""
    head = loud_head(config, big).double()
    return config.drafter(head, big), graphed(config.drafter(head, big), *graphs)


@pytest.fixture(scope="module")
def big():
    return target(llava(0, layers=6))


CASES = [
    ("eagle3", TREE, 0.0, "top-k"), ("eagle3", TREE, 1.0, "top-k"), ("eagle3", Chain(4), 0.0, "top-k"),
    ("eagle", TREE, 0.0, "top-k"), ("eagle", Static(STATIC), 1.0, "sample"), ("sparrow", TREE, 0.7, "top-k"),
    ("msd", Chain(4), 1.0, "sample"), ("vispec", TREE, 0.0, "top-k"), ("hivis", Static(STATIC), 0.0, "top-k"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "policy", "temperature", "draw"), CASES)
def test_they_propose_what_eager_passes_propose(big, kind, policy, temperature, draw):
    """Over requests of other lengths and pictures, in the same buffers; buckets change inside an answer."""
    eager, ours = pair(big, settings_of(kind))
    for seed in range(3):
        check(big, eager, ours, request(seed, images=(seed + 1) % 2), policy, temperature, draw=draw)
    assert ours.graphs.num_replayed > 60 and ours.graphs.num_eager == 0


@pytest.mark.parametrize("kind", ["eagle3", "vispec"])
def test_recorded_passes_propose_what_eager_passes_propose(big, recorded, kind):  # noqa: F811
    """And nothing is captured for a request like one before."""
    eager, ours = pair(big, settings_of(kind), (64,))
    for seed in (1, 2, 1):
        captured = len(ours.graphs.captured)
        check(big, eager, ours, request(seed, images=seed % 2), length=8)
    assert captured == len(ours.graphs.captured) > 1 and ours.graphs.num_eager == 0


def test_positions_in_three_coordinates():
    model = tiny_qwen.target(tiny_qwen.model("qwen2_5_vl"))
    eager, ours = pair(model, settings_of("eagle", positions="mrope"))
    for seed in range(2):
        check(model, eager, ours, tiny_qwen.request("qwen2_5_vl", seed=seed, words=3 + 4 * seed), length=12)
    assert ours.graphs.num_eager == 0 and ours.graphs.num_replayed > 20


@pytest.mark.parametrize("family", ["llamagen", "anole"])
def test_a_head_of_an_image_generator(family):
    """Rows with and without the condition; Anole's hide the padding of the shorter row, another in each request."""
    if family == "llamagen":
        generator = visual_tiny.llamagen("text", 0)
        model, asked = visual_tiny.target(generator, 3.0), [visual_tiny.request(generator, seed) for seed in (1, 2)]
    else:
        model = visual_tiny.anole()
        asked = [ImageRequest(torch.tensor([24 + seed, 30][:seed])) for seed in (1, 2)]
    torch.manual_seed(0)
    head = visual_tiny.EAGLE.build(model)
    eager, ours = visual_tiny.EAGLE.drafter(head, model), graphed(visual_tiny.EAGLE.drafter(head, model))
    for one in asked:
        check(model, eager, ours, one, temperature=1.0, length=16)
    assert ours.graphs.num_eager == 0 and ours.graphs.num_replayed > 20


def test_members_of_an_ensemble_have_graphs_of_their_own(big):
    def ensemble(prepared):
        configs = [settings_of(kind) for kind in ("eagle", "eagle3")]
        members = [prepared(config.drafter(loud_head(config, big), big)) for config in configs]
        return MixedProposal(members, FixedWeights(kind="fixed", values=(0.5, 0.5)).build(2), big.vocab_size)

    ours = ensemble(graphed)
    check(big, ensemble(lambda one: one), ours, request(1, 1))
    assert all(member.graphs.num_replayed > 10 for member in ours.members)


def test_nothing_of_a_former_request_is_left(big):
    """A mask hides what a place held, but not a NaN."""
    eager, ours = pair(big, settings_of("vispec"))
    said(big, ours, TREE, request(1, 1), 0.0)
    graphs = ours.graphs
    buffers = [part for layer in graphs._cache.own_layers for part in (layer.keys, layer.values)]
    with torch.inference_mode():
        for buffer in (*buffers, *graphs._placed.values()):
            buffer.fill_(float("nan"))
    assert ours.root().isnan().any(), "else this test could not fail"
    check(big, eager, ours, request(2, 0))


def test_what_no_graph_holds_is_run_eagerly_and_counted(big):
    config, asked = settings_of("eagle3"), request(1, 1)
    head = loud_head(config, big)
    long = said(big, config.drafter(head, big), TREE, asked, 0.0)[0]
    ours = graphed(config.drafter(head, big), (48,))
    assert said(big, ours, TREE, asked, 0.0)[0] == long
    assert ours.graphs.num_replayed == 0 and ours.graphs.num_eager > 10
    assert "eager (longer than 48 places, more than 8 nodes, or layers are hooked)" in ours.graphs.summary
    # Levels of 9 nodes after roots that fit, and levels that fit after those.
    wide = Static([(0,), *((0, n) for n in range(9)), *((0, n, 0) for n in range(9)), (0, 0, 0, 0)])
    expected = said(big, config.drafter(head, big), wide, asked, 0.0)[0]
    ours = graphed(config.drafter(head, big))
    assert said(big, ours, wide, asked, 0.0)[0] == expected
    assert ours.graphs.num_replayed > 5 and ours.graphs.num_eager > 5


def test_where_it_cannot_be(big):
    generator = visual_tiny.llamagen("text", 0)
    for model, why in (
        (big, "the target is on a CPU"), (visual_tiny.target(generator, 3.0), "the target is on a CPU"),
        (LlamaGenTarget(generator, Guidance(3.0, 4)),
         "guidance ends within a picture, so that scores depend on the token's number"),
    ):  # fmt: skip
        assert why_not(model) == why


def test_a_cache_for_all_lengths_that_does_not_fit_is_given_up():
    """Requests have caches of their own then, as without graphs; where graphs are a must, the error is theirs."""

    def make(places):
        if places > 700:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return places

    told = []
    graphs = PassGraphs(torch.device("cpu"), (256, 768), (8,), make, told.append)
    assert graphs.new_cache(300) == graphs.new_cache(301) - 1 == 300
    assert told == [graphs.failure] and "out of memory" in graphs.failure
    with pytest.raises(torch.OutOfMemoryError):
        PassGraphs(torch.device("cpu"), (256, 768), (8,), make).new_cache(300)
