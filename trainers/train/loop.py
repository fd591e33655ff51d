"""The training loop: it knows no method, only batches, a module that returns a loss, and an engine.

One all-reduce per optimizer step carries the supervised tokens of the *next* step, the stop flag and
whether every gradient of this step is finite; it stands before the update, and nothing else waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...core import ranks
from ...core.errors import TrainingError
from ...core.json_types import JsonMapping, JsonObject
from ...core.states import TargetStates, uploaded
from ...data.loader import StepBatches
from ..run.stopping import Stop, Stopped
from . import checkpoint
from .checkpoint import CheckpointConfig
from .engine import Engine

# Steps in a row, or logs, that have nothing to learn, after which the data is at fault.
MOST_SILENT = 8

Log = Callable[[JsonMapping, int], None]
# A micro-batch on this rank's device -> the frozen target's states for it.
Source = Callable[[Any], TargetStates | None]
# engine, step -> what is logged: numbers, and paths of pictures
Validate = Callable[[Engine, int], Mapping[str, float | Path]]
# engine, a step's batches -> the same with what the model itself has to write for them
Write = Callable[[Engine, StepBatches], StepBatches]


@dataclass(frozen=True)
class Training:
    """One training, ready to run."""

    # `forward(batch, states)` returns a `StepLoss`; `parts()` the trainable parameters with their names, by part.
    module: nn.Module
    steps: Callable[[int], Any]  # first step -> a loader of this rank
    total: int  # optimizer steps
    finish: Callable[[Engine], None]  # writes the stage's result (all ranks call)
    source: Source = lambda batch: None  # a module that learns from its data alone
    validate: Validate | None = None
    validate_every: int | None = None  # steps, and after the last one
    # Completes a step's batches with answers that the draft writes itself, by the weights as they are before the step;
    # their tokens can only be counted then, which costs a second all-reduce.
    write: Write | None = None
    # How many records supervise nothing, and why; empty: none is left out.
    left_out: Callable[[], str] = lambda: ""
    # What is at fault where the loss compares no supervised token; empty: it compares each.
    why_untaught: str = ""


@dataclass
class _Sums:
    """Sums since the last log, kept on the device. Reading them is the only synchronisation."""

    loss: torch.Tensor
    tokens: float = 0.0
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, loss: torch.Tensor, metrics: dict[str, torch.Tensor]) -> None:
        self.loss = self.loss + loss.detach()
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, torch.zeros_like(self.loss)) + value.detach()


def train(
    engine: Engine,
    training: Training,
    checkpoints: CheckpointConfig,
    *,
    log_every: int,
    folder: Path,
    fingerprint: str,
    log: Log,
    rewind: Callable[[int], None],
    say: Callable[[str], None],
    saved: Callable[[Path, int], None] = lambda path, step: None,
    stop: Stop | None = None,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Train to the last step, resuming from the newest good checkpoint under `folder`. `rewind` is told the step that
    training starts from, so that later lines of an earlier try go; `saved` the folder and the step of each checkpoint;
    `tick` is called once a step is done, on every rank, and must not wait for the device.

    A step without a supervised token on any rank is passed over: it changes neither weights nor learning rate.

    Raises `TrainingError` for a loss or gradient that is not finite, a run of steps without supervised tokens, or a
    skipped step; `Stopped` where `stop` was raised and steps or a validation are left, when the state is saved.
    """
    resumed: checkpoint.Found | None = ranks.on_main(checkpoint.find, folder, fingerprint)
    step = 0
    if resumed is not None:
        checkpoint.load(engine, resumed)
        step = resumed.step
        for note in resumed.notes:
            say(f"refused checkpoint {note}")
        say(f"resuming from {resumed.path} (step {step})")
    rewind(step)

    def save(step: int, validated: bool) -> None:
        path = checkpoint.save(
            engine, folder, step=step, fingerprint=fingerprint, keep=checkpoints.keep, validated=validated
        )
        saved(path, step)

    if resumed is not None and not resumed.validated:
        _validated(engine, training, step, log, save)
    loader, stop = training.steps(step), stop or Stop()
    skipped = engine.num_skipped
    sums = _Sums(torch.zeros((), device=engine.device))
    clock, samples = time.perf_counter(), 0
    tokens, silent, logs_without_loss = None, 0, 0
    # Each step with the next one, whose tokens must be counted before it begins.
    for current, following in pairwise(chain(loader, [None])):
        ranks.pulse().begin(f"step {step + 1} of {training.total}", is_step=True)
        if training.write is not None:
            current, tokens = training.write(engine, current), None
        if tokens is None:
            tokens = _all_reduce(engine, _num_supervised(current))[0]
        silent = 0 if tokens else silent + 1
        if silent == MOST_SILENT:
            raise _silence(training, f"steps {step + 1 - silent} to {step}: no supervised token", _names(current))
        if tokens:
            loss_is_finite = _forward_backward(engine, current, training.source, tokens, sums)
        else:  # the same on all ranks; a source counts the batches that it is asked for
            for batch in current.micro:
                training.source(batch.to(engine.device))
            loss_is_finite = torch.ones((), device=engine.device)
        finite = loss_is_finite * engine.gradients_are_finite
        next_tokens, stops, broken = _all_reduce(
            engine, _num_supervised(following) if following else 0, float(stop.raised), 1 - finite
        )
        if broken:
            raise TrainingError(
                f"step {step}: a loss or gradient is not finite; the weights are those before this step",
                where=_names(current) if not finite else "records of another rank",
                hint="look at these records, lower optim.lr, or set optim.clip_norm or clip_value",
            )
        if tokens:
            engine.step()
        engine.end_step()
        if engine.num_skipped != skipped and not engine.expects_skips:
            raise TrainingError(f"step {step}: the engine skipped the update", hint="report this with the recipe")
        step += 1
        tick()
        sums.tokens += tokens
        samples += loader.batch_size
        tokens = next_tokens
        last = step == training.total
        if (step % log_every == 0 or last) and sums.tokens:
            compares = _report(engine, sums, samples, time.perf_counter() - clock, step, log)
            sums = _Sums(torch.zeros((), device=engine.device))
            clock, samples = time.perf_counter(), 0
            logs_without_loss = 0 if compares or not training.why_untaught else logs_without_loss + 1
            if logs_without_loss == 1:
                say(f"step {step}: the loss compares no token: {training.why_untaught}")
            if logs_without_loss == MOST_SILENT:
                problem = f"step {step}: the loss of {MOST_SILENT} logs compares no token"
                raise TrainingError(problem, hint=training.why_untaught)
        every = training.validate_every if training.validate is not None else None
        due = every is not None and (step % every == 0 or last)
        # After the last step without a validation the result alone is left to write, which is less than a checkpoint.
        if stops and (due or not last):
            save(step, not due)
            raise Stopped(f"after step {step}", step)
        if due:
            _validated(engine, training, step, log, save)
        if checkpoints.every and step % checkpoints.every == 0 and not last:
            save(step, True)
    if silent := training.total - engine.num_updates:
        if silent == training.total:
            raise _silence(training, f"no supervised token in any of the {silent} steps", None)
        say(f"{silent} of {training.total} steps had no supervised token, and changed nothing")
    ranks.pulse().begin("its result")


def _silence(training: Training, problem: str, where: str | None) -> TrainingError:
    why = training.left_out() or "look at these records' answers; over-long or unreadable ones supervise nothing"
    return TrainingError(problem, where=where, hint=why)


def _validated(engine: Engine, training: Training, step: int, log: Log, save: Callable[[int, bool], None]) -> None:
    """Validate, or save the state of before where the run is asked to stop meanwhile: a resumed run begins with it."""
    assert training.validate is not None
    before = checkpoint.random_state()
    ranks.pulse().begin(f"the validation after step {step}")
    try:
        values = training.validate(engine, step)
    except Stopped:
        checkpoint.restore_random_state(before)
        save(step, False)
        raise Stopped(f"in the validation of step {step}", step) from None
    log(values, step)


def _forward_backward(engine: Engine, batches: StepBatches, source: Source, tokens: float, sums: _Sums) -> torch.Tensor:
    """One optimizer step's forwards and backwards; returns 1 where every loss was finite."""
    finite = torch.ones((), device=engine.device)
    for number, batch in enumerate(batches.micro):
        if number:
            engine.step()  # not at the boundary yet: DeepSpeed only counts the micro-batch
        engine.begin(last=number == len(batches.micro) - 1)
        batch = batch.to(engine.device)
        states = source(batch)
        loss = engine(batch, states)
        finite = finite * loss.loss_sum.detach().isfinite()
        engine.backward(loss.loss_sum, tokens)
        sums.add(loss.loss_sum, loss.metrics)
    return finite


def _num_supervised(batches: StepBatches) -> int:
    return sum(batch.num_supervised for batch in batches.micro)


def _all_reduce(engine: Engine, *values: float | torch.Tensor) -> list[float]:
    """The ranks' sums. Reading them is the step's one synchronisation: a value on the device joins the others there."""
    numbers = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
    total = torch.tensor(numbers, dtype=torch.float64 if engine.device.type == "cpu" else torch.float32)
    total = uploaded(total, engine.device)
    for number, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            total[number] = value
    dist.all_reduce(total)
    return total.tolist()


def _report(engine: Engine, sums: _Sums, samples: int, seconds: float, step: int, log: Log) -> bool:
    """Log; returns whether the loss compared anything: there alpha, where it logs one, is above 0."""
    names = sorted(sums.metrics)
    values = torch.stack([sums.loss, *(sums.metrics[n].to(sums.loss) for n in names)]).double()
    dist.all_reduce(values)
    loss, *rest = (values / sums.tokens).tolist()
    shown: JsonObject = {"loss": loss, **dict(zip(names, rest, strict=True)), "lr": engine.rates()[0]}
    shown |= {"samples_per_s": samples / seconds, "tokens_per_s": sums.tokens / seconds}
    if ranks.is_main():
        log(shown, step)
    return bool(loss and shown.get("alpha", loss))


def _names(batches: StepBatches) -> str:
    names = [name for batch in batches.micro for name in batch.sample_ids]
    return ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "")
