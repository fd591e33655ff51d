"""Stopped after any step, by a signal or a crash, and started again: bit for bit the run that nobody stopped."""

import functools
import json
import os
import signal

import pytest
from draftsmith.core.tracking import Tracker, TrackingConfig
from draftsmith.trainers.checkpoint import CheckpointConfig
from draftsmith.trainers.loop import Stopped

from .training import Run, same, scrambled, tiny

STEPS, DROPOUT = 8, 0.3


@functools.cache
def alone(zero_stage: int, precision: str = "fp32") -> tuple[dict, dict]:
    """Losses and final weights of a run that nobody stops; it crosses an epoch's end after step 4."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        run = Run(tiny(dropout=DROPOUT), zero_stage=zero_stage, precision=precision, steps=STEPS).train(Path(folder))
        assert not list(Path(folder).iterdir())
    return run.losses, run.weights()


def test_dropout_makes_the_random_state_matter(tmp_path):
    """Without this the tests below would pass though no random state were restored."""
    losses, _ = alone(0)
    assert sorted(losses) == list(range(1, STEPS + 1))
    without = Run(tiny(), steps=STEPS).train(tmp_path)
    assert all(without.losses[step] != losses[step] for step in losses)


def interrupt(run: Run, step: int, number: int) -> Run:
    """Send `number` to this process while optimizer step `step` is computed."""
    if step == 1:
        run.on_loader = lambda: os.kill(os.getpid(), number)
    else:
        run.log = lambda done, loss: os.kill(os.getpid(), number) if done == step - 1 else None
    return run


CASES = [
    *((0, "fp32", step) for step in range(1, STEPS + 1)),
    *((2, "fp32", step) for step in (1, 4, 7)),
    *((3, "fp32", step) for step in (3, 4)),
    (0, "bf16", 5),
    (2, "bf16", 5),
]


@pytest.mark.parametrize(("zero_stage", "precision", "step"), CASES)
def test_stopped_after_any_step(tmp_path, zero_stage, precision, step):
    expected_losses, expected_weights = alone(zero_stage, precision)
    settings = {"zero_stage": zero_stage, "precision": precision, "steps": STEPS}
    first = interrupt(Run(tiny(dropout=DROPOUT), **settings), step, signal.SIGTERM)
    handler = signal.getsignal(signal.SIGTERM)
    if step < STEPS:
        with pytest.raises(Stopped, match=f"after step {step}$"):
            first.train(tmp_path)
    else:
        first.train(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:08d}"]
    second = Run(scrambled(tiny(dropout=DROPOUT)), **settings).train(tmp_path)
    assert second.rewound == [step]
    assert sorted(first.losses) == list(range(1, step + 1))
    assert sorted(second.losses) == list(range(step + 1, STEPS + 1))
    assert first.losses | second.losses == expected_losses
    assert same(second.weights(), expected_weights)


def test_sigint_and_being_stopped_again_and_again(tmp_path):
    losses = {}
    for step in range(2, STEPS, 2):
        run = interrupt(Run(scrambled(tiny(dropout=DROPOUT)) if losses else tiny(dropout=DROPOUT)), step, signal.SIGINT)
        with pytest.raises(Stopped):
            run.train(tmp_path)
        losses |= run.losses
    last = Run(scrambled(tiny(dropout=DROPOUT))).train(tmp_path)
    assert losses | last.losses == alone(0)[0]
    assert same(last.weights(), alone(0)[1])


class Crash(Exception):
    pass


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.parametrize(("crashed_after", "resumes_from"), [(1, 0), (5, 4)])
def test_crash_between_steps_goes_on_from_the_newest_checkpoint(tmp_path, zero_stage, crashed_after, resumes_from):
    """As after SIGKILL: nothing is saved on the way out, and steps since the checkpoint are computed again."""

    def crash(step: int, loss: float) -> None:
        if step == crashed_after:
            raise Crash

    settings = {
        "zero_stage": zero_stage,
        "steps": STEPS,
        "checkpoints": CheckpointConfig(every=2, keep=2),
    }
    first = Run(tiny(dropout=DROPOUT), log=crash, **settings)
    with pytest.raises(Crash):
        first.train(tmp_path)
    module = tiny(dropout=DROPOUT)
    second = Run(scrambled(module) if resumes_from else module, **settings).train(tmp_path)
    assert second.rewound == [resumes_from]
    losses, weights = alone(zero_stage)
    assert {s: v for s, v in first.losses.items() if s <= resumes_from} | second.losses == losses
    # What is computed twice comes out the same.
    assert all(second.losses[step] == first.losses[step] for step in range(resumes_from + 1, crashed_after + 1))
    assert same(second.weights(), weights)


def test_each_step_stands_once_in_the_metrics(tmp_path):
    """The real tracker: lines after the checkpoint go when the run goes on from it."""

    def tracked(run: Run) -> Run:
        tracker = Tracker(TrackingConfig(), tmp_path, name="x", recipe={}, say=pytest.fail)
        inner = run.log

        def log(step: int, loss: float) -> None:
            tracker.log({"loss": loss}, step)
            inner(step, loss)

        run.log = log
        run.rewound = type("Rewinds", (list,), {"append": lambda self, step: tracker.rewind(step)})()
        return run

    def crash(step: int, loss: float) -> None:
        if step == 6:
            raise Crash

    every = CheckpointConfig(every=4, keep=1)
    with pytest.raises(Crash):
        tracked(Run(tiny(dropout=DROPOUT), checkpoints=every, log=crash)).train(tmp_path / "checkpoints")
    tracked(Run(scrambled(tiny(dropout=DROPOUT)), checkpoints=every)).train(tmp_path / "checkpoints")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert {row["step"]: row["loss"] for row in rows} == alone(0)[0]


def test_reading_processes_change_nothing(tmp_path):
    losses, weights = alone(0)
    run = interrupt(Run(tiny(dropout=DROPOUT), num_workers=2), 3, signal.SIGTERM)
    with pytest.raises(Stopped):
        run.train(tmp_path)
    second = Run(scrambled(tiny(dropout=DROPOUT)), num_workers=1).train(tmp_path)
    assert run.losses | second.losses == losses
    assert same(second.weights(), weights)
