"""Layer taps of image generators: what heads are trained on is what they read in decoding."""

import pytest
import torch
from draftsmith.core.batch import CodeBatch
from draftsmith.core.states import Taps
from draftsmith.models.decoding.tree import no_tree
from fails import fails_with
from test_batched_pictures import TARGETS


@pytest.mark.parametrize("name", ["class", "text", "anole"])
def test_layers_of_whole_images_are_those_of_decoding(name):
    """Teacher-forced, both sides of the guidance, captions of unequal lengths: every layer as cached passes have it."""
    target, requests = TARGETS[name]()
    requests, codes = requests[:3], torch.randint(0, 16, (3, 16), generator=torch.Generator().manual_seed(0))
    taps = Taps(feature=True, text_layers=(0, 1), visual_layers=(2,), without_condition=True)
    nothing = torch.zeros(3, dtype=torch.bool)
    batch = CodeBatch(codes, tuple(r.condition for r in requests), nothing, ~nothing, ("a", "b", "c"), 15)
    states = target.states(batch, taps)
    assert states.unconditional is not None
    assert set(states.layers) == set(states.unconditional.layers) == {0, 1, 2}
    first_id = 4 if name == "anole" else 0
    for row, asked in enumerate(requests):
        session, prefill = target.prefill(asked, taps, capacity=20)
        steps = [prefill]
        for code in codes[row].tolist():
            steps.append(target.verify(session, code + first_id, no_tree()))
            target.commit(session, [])
        for layer in (0, 1, 2):
            decoded = torch.cat([step.layers[layer] for step in steps], dim=1)  # [2,T,D]
            for side, whole in enumerate((states, states.unconditional)):
                own = decoded[side][-16 - 1 :]  # from the prompt's last token on: padding differs
                torch.testing.assert_close(whole.layers[layer][row, -17:], own, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["text", "anole"])
def test_layers_that_a_target_does_not_have_are_refused(name):
    target, requests = TARGETS[name]()
    one = torch.zeros(1, dtype=torch.bool)
    batch = CodeBatch(torch.zeros(1, 16, dtype=torch.int64), (requests[0].condition,), one, ~one, ("a",), 15)
    fails_with("states after layer 3 are wanted, and the target has 2", target.states, batch, Taps(text_layers=(3,)))
