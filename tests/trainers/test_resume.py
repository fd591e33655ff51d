"""Stopped or killed at any step, one rank comes back to the same losses and weights, bit for bit."""

import functools
import json
import os
import signal

import pytest
import torch
from draftsmith.core.tracking import Tracker, TrackingConfig
from draftsmith.trainers.run.stopping import Stopped
from draftsmith.trainers.train.checkpoint import CheckpointConfig
from draftsmith.trainers.train.fit import OptimConfig
from draftsmith.trainers.train.loop import train
from fails import fails_with
from training import Samples, engine, loader, module, run, training_of

STEPS = 8  # three to an epoch, so that stops fall inside, at and after epoch borders


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """ZeRO stage -> losses and weights of a run that nobody disturbs; each is run once."""

    @functools.cache
    def of_stage(zero):
        losses, weights, _ = run(tmp_path_factory.mktemp("alone"), steps=STEPS, zero=zero)
        assert len(losses) == STEPS
        return losses, weights

    return of_stage


@pytest.fixture(params=[0, 1, 2, 3], ids=lambda z: f"zero{z}")
def alone(request, undisturbed):
    return request.param, *undisturbed(request.param)


def equal(actual, expected):
    assert actual.keys() == expected.keys()
    return all(torch.equal(actual[name], expected[name]) for name in expected)


def at(all_steps, few):
    """Stages 1 and 2 share their checkpoint code with 0 but for the optimizer's parts: few of the steps there.
    The other steps of stage 3 are slow tests: the loop, in which the step matters, is the same for all stages.
    """
    cases = [
        pytest.param(zero, step, marks=pytest.mark.slow if zero == 3 and step not in few else ())
        for zero in range(4)
        for step in (few if zero in (1, 2) else all_steps)
    ]
    return pytest.mark.parametrize(("alone", "step"), cases, indirect=["alone"])


@at(range(1, STEPS - 1), few=(2, 3))
def test_asked_to_stop_at_every_step(alone, step, tmp_path):
    zero, losses, weights = alone

    def terminate(now):
        if now == step:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = fails_with("", run, tmp_path, steps=STEPS, zero=zero, log=terminate, error=Stopped)
    # The flag travels with the all-reduce of the next step, which is then the last one.
    assert stopped.step == step + 1
    seen, result, told = run(tmp_path, steps=STEPS, zero=zero)
    assert any("resuming from" in line for line in told)
    assert seen == {at: loss for at, loss in losses.items() if at > stopped.step}
    assert equal(result, weights)


class Died(Exception):
    pass


@at((1, 2, 3, 5, 7), few=(2, 5))
def test_died_without_a_word(alone, step, tmp_path):
    """As after SIGKILL: nothing is saved at the end, and the newest checkpoint is older than the last step."""
    zero, losses, weights = alone

    def die(now):
        if now == step:
            raise Died

    with pytest.raises(Died):
        run(tmp_path, steps=STEPS, zero=zero, every=2, log=die)
    seen, result, _ = run(tmp_path, steps=STEPS, zero=zero, every=2)
    first = 2 * ((step - 1) // 2) + 1
    assert seen == {at: loss for at, loss in losses.items() if at >= first}
    assert equal(result, weights)


def test_asked_to_stop_before_the_last_step_it_finishes(alone, tmp_path):
    zero, losses, weights = alone
    seen, result, _ = run(
        tmp_path, steps=STEPS, zero=zero, log=lambda s: s == STEPS - 1 and os.kill(os.getpid(), signal.SIGTERM)
    )
    assert seen == losses and equal(result, weights)


def test_asked_to_stop_before_the_first_step_it_does_one(alone, tmp_path):
    """By either signal, and with the handlers as they were afterwards."""
    zero, losses, weights = alone
    number = signal.SIGTERM if zero else signal.SIGINT

    class Interrupting(Samples):
        asked = False

        def __getitem__(self, index):
            if not self.asked:
                self.asked = True
                os.kill(os.getpid(), number)
            return super().__getitem__(index)

    handler = signal.getsignal(number)
    stopped = fails_with("", run, tmp_path, steps=STEPS, zero=zero, samples=Interrupting(), error=Stopped)
    assert stopped.step == 1
    assert signal.getsignal(number) is handler
    seen, result, _ = run(tmp_path, steps=STEPS, zero=zero)
    assert seen == {step: loss for step, loss in losses.items() if step > 1}
    assert equal(result, weights)


@pytest.mark.parametrize("zero", [0, 2])
def test_bf16_comes_back_bit_equal(zero, tmp_path):
    """The float32 master weights are in the checkpoint: the bfloat16 ones alone would have lost digits."""
    settings = {"steps": STEPS, "zero": zero, "precision": "bf16"}
    losses, weights, _ = run(tmp_path / "alone", **settings)
    with pytest.raises(Stopped):
        run(tmp_path / "c", log=lambda step: step == 4 and os.kill(os.getpid(), signal.SIGTERM), **settings)
    seen, result, _ = run(tmp_path / "c", **settings)
    assert seen == {step: loss for step, loss in losses.items() if step > 5}
    assert equal(result, weights)


def test_each_step_stands_once_in_the_metrics(tmp_path):
    """The real tracker with the real loop: what is computed again is written again, in place of the first time."""

    def once(die_after):
        tracker = Tracker(TrackingConfig(), tmp_path, name="x", recipe={}, say=pytest.fail)

        def log(values, step):
            tracker.log(values, step)
            if step == die_after:
                raise Died

        model, optim = module(), OptimConfig(lr=1e-2)
        torch.manual_seed(0)
        train(
            engine(model, optim, steps=STEPS),
            training_of(functools.partial(loader, Samples(), STEPS), STEPS),
            CheckpointConfig(every=3, keep=1),
            log_every=1,
            folder=tmp_path / "c",
            fingerprint="f",
            log=log,
            rewind=tracker.rewind,
            say=lambda line: None,
        )

    for die_after in (2, 5, 7):  # before the first checkpoint, between two, after the last
        with pytest.raises(Died):
            once(die_after)
    once(None)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
