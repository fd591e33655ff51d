"""Stopped or killed at any step, one rank comes back to the same losses and weights, bit for bit."""

import os
import signal

import pytest
import torch
from draftsmith.trainers.loop import Stopped
from training import run

STEPS = 8  # three to an epoch, so that stops fall inside, at and after epoch borders


@pytest.fixture(scope="module", params=[0, 1, 2, 3], ids=lambda z: f"zero{z}")
def alone(request, tmp_path_factory):
    losses, weights, _ = run(tmp_path_factory.mktemp("alone"), steps=STEPS, zero=request.param)
    assert len(losses) == STEPS
    return request.param, losses, weights


def equal(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stop", range(1, STEPS - 1))
def test_asked_to_stop_at_every_step(alone, stop, tmp_path):
    zero, losses, weights = alone
    if zero in (1, 2) and stop not in (2, 3):
        stop = 3  # stages 1 and 2 share their checkpoint code with 0 but for the optimizer's parts

    def terminate(step):
        if step == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped) as stopped:
        run(tmp_path, steps=STEPS, zero=zero, log=terminate)
    # The flag travels with the all-reduce of the next step, which is then the last one.
    assert stopped.value.step == stop + 1
    seen, found, told = run(tmp_path, steps=STEPS, zero=zero)
    assert any("resuming from" in line for line in told)
    assert seen == {step: loss for step, loss in losses.items() if step > stopped.value.step}
    assert equal(found, weights)


class Died(Exception):
    pass


@pytest.mark.parametrize("death", [1, 2, 3, 5, 7])
def test_died_without_a_word(alone, death, tmp_path):
    """As after SIGKILL: nothing is saved at the end, and the newest checkpoint is older than the last step."""
    zero, losses, weights = alone

    def die(step):
        if step == death:
            raise Died

    with pytest.raises(Died):
        run(tmp_path, steps=STEPS, zero=zero, every=2, log=die)
    seen, found, _ = run(tmp_path, steps=STEPS, zero=zero, every=2)
    first = 2 * ((death - 1) // 2) + 1
    assert seen == {step: loss for step, loss in losses.items() if step >= first}
    assert equal(found, weights)


def test_asked_to_stop_before_the_last_step_it_finishes(alone, tmp_path):
    zero, losses, weights = alone
    seen, found, _ = run(
        tmp_path, steps=STEPS, zero=zero, log=lambda s: s == STEPS - 1 and os.kill(os.getpid(), signal.SIGTERM)
    )
    assert seen == losses and equal(found, weights)
