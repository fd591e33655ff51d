"""Operations of an EAGLE-3 training step on a CPU, where calls take longer than arithmetic, as
`tests/eval/test_cycle_operations.py` counts those of a decode cycle.
"""

import torch
from heads_tiny import built, case_for
from test_cycle_operations import Operations

# The most that a step of seven passes may have. It has 716 and 905 under torch 2.13.
FORWARD, BACKWARD = 720, 910


def test_a_step_has_a_bounded_number_of_operations():
    """Of 64 tokens, of which the last three quarters are supervised."""
    config, target, training = built("eagle3", mtp_steps=6)
    case = case_for(config, target, (16 * "t" + 48 * "a",))
    training(*case).loss_sum.backward()
    with torch.autograd.set_multithreading_enabled(False):
        with Operations() as forward:
            loss = training(*case).loss_sum
        with Operations() as backward:
            loss.backward()
    assert forward.count <= FORWARD and backward.count <= BACKWARD, (forward.count, backward.count)
