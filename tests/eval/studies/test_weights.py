"""What is recorded of an ensemble's weights is what it decoded with, and what is said of other weights is true."""

import pytest
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Static
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.ensemble import EnsembleConfig, preset
from draftsmith.models.drafters.weights import FixedWeights
from draftsmith.trainers.evaluate.probes import trace_weights
from test_ensemble import TREE, ensemble
from tiny import llava, near, request, target

DECODING = Decoding(Chain(3), Greedy(), Draw("top-k"), Warp(), 24, ())


@pytest.fixture(scope="module")
def models():
    big = llava(0)
    return big, near(big)


def fixed(share):
    return EnsembleConfig(name="x", members=("M", "T"), weights=FixedWeights(kind="fixed", values=(share, 1 - share)))


def test_what_is_taken_is_what_fixed_weights_would_have_drafted(models):
    """At each step, for some weights of the line: the likeliest token of that mixture is the target's, or is not."""
    big, draft = models
    asked = request(1, 2)
    trace = trace_weights(target(big), ensemble(draft, preset("MT*")), asked, DECODING)
    tokens = generate(target(big), None, asked, DECODING).tokens
    checked = []
    for column in (0, 3, 5, 10):
        drafter = ensemble(draft, fixed(trace.line[column]))
        for step, accepted in zip(trace.steps, trace.accepted, strict=True):
            drafter.start(asked, None, Warp(), capacity=30)
            drafter.begin(tokens[0])
            drafter._pending = tokens[:step]
            assert (int(drafter.root().argmax()) == tokens[step]) == accepted[column]
            checked.append(accepted[column])
    assert 0 < sum(checked) < len(checked)
    assert any(0 < sum(accepted) < len(accepted) for accepted in trace.accepted), "for some steps the weight matters"


@pytest.mark.parametrize("policy", [Chain(3), Static(TREE)], ids=["chain", "tree"])
def test_steps_and_weights(models, policy):
    """Each output token but the first and those that no draft proposed; the weights are those of its cycle."""
    big, draft = models
    drafter, asked = ensemble(draft, preset("MT*")), request(0, 1)
    decoding = Decoding(policy, Greedy(), Draw("top-k"), Warp(), 24, ())
    used, root = [], drafter.root

    def watched():
        used.append(drafter.weights.current.tolist())
        return root()

    drafter.root = watched
    trace = trace_weights(target(big), drafter, asked, decoding)
    drafter.root = root
    result = generate(target(big), drafter, asked, decoding)
    assert not drafter.record and drafter.trace is None
    # A cycle's accepted tokens and the one that the target put in their place, where one was drafted there.
    expected, emitted = [], 1
    for cycle in result.cycles:
        expected += [emitted + i for i in range(min(cycle.num_accepted + 1, cycle.num_drafted))]
        emitted += cycle.num_accepted + 1
    assert trace.steps == expected
    assert trace.cycles == used[: len(trace.cycles)]
    assert trace.cycles[0] == [0.5, 0.5] and len({tuple(w) for w in trace.cycles}) > 1
    assert trace.cycle_of_step[0] == 0 and trace.cycle_of_step == sorted(trace.cycle_of_step)


def test_the_line_moves_between_m_and_t_where_they_are_members(models):
    big, draft = models
    for members, pair in (("MTCP", (0, 1)), ("PC", (0, 1)), ("CTM", (2, 1))):
        config = EnsembleConfig(name="x", members=tuple(members), weights={"kind": "fixed"})
        assert trace_weights(target(big), ensemble(draft, config), request(0, 1), DECODING).pair == pair
