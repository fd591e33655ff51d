"""What is recorded of an ensemble's weights is what it decoded with, and what the shade says is true."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Static
from draftsmith.eval.rules import Greedy
from draftsmith.eval.studies import ensemble_weights as weights
from draftsmith.eval.studies.ensemble_weights import (
    WeightsFigure,
    plot_weights,
    trace_weights,
    weights_over_time,
    weights_section,
)
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.ensemble import EnsembleConfig, WeightTrace, preset
from draftsmith.models.drafters.weights import FixedWeights, InverseWeights
from test_ensemble import TREE, ensemble
from tiny import llava, near, request, target

DECODING = Decoding(Chain(3), Greedy(), Draw("top-k"), Warp(), 24, ())


@pytest.fixture(scope="module")
def models():
    big = llava(0)
    return big, near(big)


def fixed(share):
    return EnsembleConfig(name="x", members=("M", "T"), weights=FixedWeights(kind="fixed", values=(share, 1 - share)))


def test_the_shade_is_what_fixed_weights_would_have_drafted(models):
    """At each step, for some weights of the line: the likeliest token of that mixture is the target's, or is not."""
    big, draft = models
    asked = request(1, 2)
    curve = weights_over_time(trace_weights(target(big), ensemble(draft, preset("MT*")), asked, DECODING))
    tokens = generate(target(big), None, asked, DECODING).tokens
    checked = []
    for column in (0, 3, 5, 10):
        drafter = ensemble(draft, fixed(curve.line[column]))
        for step, taken in zip(curve.steps, curve.accepted[:, column], strict=True):
            drafter.start(asked, None, Warp(), capacity=30)
            drafter.begin(tokens[0])
            drafter._pending = tokens[:step]
            assert (int(drafter.root().argmax()) == tokens[step]) == taken
            checked.append(taken)
    assert 0 < sum(checked) < len(checked)
    assert not (curve.accepted.all(1) | ~curve.accepted.any(1)).all(), "for some steps the weight matters"


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


def test_more_than_two_members_and_none_of_the_two(models, tmp_path):
    big, draft = models
    four = trace_weights(target(big), ensemble(draft, preset("MTCP*")), request(0, 1), DECODING)
    curve = weights_over_time(WeightTrace(**json.loads(json.dumps(asdict(four)))))
    assert curve.names == ("M", "T")
    weights = np.array(four.cycles)[four.cycle_of_step]
    assert curve.weight == pytest.approx(weights[:, 0] / (weights[:, 0] + weights[:, 1]))
    # All weight on neither of the two shown: a gap.
    best = EnsembleConfig(name="x", members=("P", "C"), weights=InverseWeights(kind="inverse", temperature=0))
    other = weights_over_time(trace_weights(target(big), ensemble(draft, best), request(0, 1), DECODING))
    assert other.names == ("P", "C")
    assert 0 <= curve.taken() <= curve.known.sum() == len(curve.steps)
    plot_weights(tmp_path / "weights.png", {"four": curve, "two": other})
    assert (tmp_path / "weights.png").stat().st_size > 5000


def test_steps_that_nothing_was_drafted_for_are_grey(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(weights, "save", lambda figure, path: kept.append(figure))
    trace = WeightTrace(("M", "T"), (0, 1), [0.0, 1.0], [[0.5, 0.5]], [1, 4], [0, 0], [[True, False]] * 2)
    plot_weights(tmp_path / "a.png", {"r": weights_over_time(trace)})
    (panel,) = kept[0].axes
    assert sorted(patch.get_x() + patch.get_width() / 2 for patch in panel.patches) == [2, 3]
    (legend,) = kept[0].legends
    told = [text.get_text() for text in legend.texts]
    assert told == ["weight in use", "weights whose token the target takes", "not drafted"]


def test_a_gap_where_neither_counts():
    trace = WeightTrace(("M", "T", "P"), (0, 1), [0.0, 0.5, 1.0], [[0, 0, 1], [0.5, 0, 0.5]], [1, 2], [0, 1],
                        [[True, True, False], [False, False, True]])  # fmt: skip
    curve = weights_over_time(trace)
    assert np.isnan(curve.weight[0]) and curve.weight[1] == 1
    assert curve.taken() == 1 and curve.known.tolist() == [False, True]
    assert [curve.taken(weight) for weight in (1.0, 0.5, 0.0)] == [1, 0, 0], "of the steps that have a weight"
    section = weights_section(
        [WeightsFigure("weights/a.png", "Spot, first", "draft", "MT*", {"r0": curve, "r1": curve})]
    )
    table, figure = section.content
    assert table.rows == (("Spot, first", "draft", "MT*", 2, 2, 1.0, 1.0, 0.0, 0.0),)
    assert figure.path == "weights/a.png" and "figures 3 and 4" in table.source
    torch.testing.assert_close(torch.tensor(curve.accepted), torch.tensor(trace.accepted))
