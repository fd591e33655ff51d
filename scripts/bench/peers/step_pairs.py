"""Neighbouring training steps of two implementations: times in turn, equality of loss and gradients, and where they go.

Times are this thread's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from draftsmith.scripts.timing import in_turn, ratios, row, spread, table
from peers.pairs import Meter, Method, watched
from torch import Tensor, nn, optim
from torch.profiler import ProfilerActivity, profile

LENGTHS = (64, 256, 512, 1024)  # tokens of a sample
TOLERANCE = 2e-5  # of losses and gradients, relative
REST, BACKWARD, ADAMW = "the rest of the forward", "backward", "AdamW"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "flash_attention_for_cpu")
Sample = Sequence[Any]


class Trained(Protocol):
    """One of the two sides."""

    trained: Mapping[str, nn.Parameter]
    optimizer: optim.Optimizer
    watched: Mapping[str, Sequence[Method]]  # part of the loss -> what it is spent in

    def loss(self, *sample: Any) -> Tensor: ...


# What its rows are of, ours, theirs, what makes samples of a length, and the tolerance of gradients.
Sides = tuple[str, Trained, Trained, Callable[[int], Callable[[int], Sample]], float]


def step(side: Trained, sample: Sample) -> None:
    """One step."""
    side.optimizer.zero_grad()
    side.loss(*sample).backward()
    side.optimizer.step()


def parts(side: Trained, sample: Sample) -> dict[str, float]:
    """Seconds of each part of one step: those of `watched`, then `REST`, `BACKWARD` and `ADAMW`."""
    meter = Meter()
    meter.part(ADAMW)(side.optimizer.zero_grad)()
    with ExitStack() as stack:
        for part, methods in side.watched.items():
            stack.enter_context(watched(methods, meter.part(part)))
        loss = meter.part(REST)(side.loss)(*sample)
    meter.part(BACKWARD)(loss.backward)()
    meter.part(ADAMW)(side.optimizer.step)()
    return {part: meter.seconds[part] for part in (*side.watched, REST, BACKWARD, ADAMW)}


def check_equal(
    what: str, ours: Trained, theirs: Trained, sample: Sample, gradients: float = TOLERANCE
) -> tuple[float, float]:
    """The largest relative differences of the loss and of a weight's gradient.

    Raises:
        SystemExit: the loss's is above `TOLERANCE`, or a gradient's above `gradients`.
    """
    losses = []
    for side in (ours, theirs):
        side.optimizer.zero_grad()
        loss = side.loss(*sample)
        loss.backward()
        losses.append(float(loss.detach()))
    assert ours.trained.keys() == theirs.trained.keys(), ours.trained.keys() ^ theirs.trained.keys()
    apart = 0.0
    for name, parameter in ours.trained.items():
        mine, other = parameter.grad, theirs.trained[name].grad
        assert mine is not None and other is not None, name
        apart = max(apart, float((mine - other).norm() / other.norm()))
    difference = abs(losses[0] / losses[1] - 1)
    if difference > TOLERANCE or apart > gradients:
        raise SystemExit(f"{what}: losses {losses}, gradients {apart:.1e} apart")
    return difference, apart


def products_share(side: Trained, sample: Sample) -> float:
    """The share of a step in matrix products and attention kernels, which the profiler makes smaller than it is: what
    it takes itself counts among the rest.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(side, sample)
    seconds = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    within = sum(time for name, time in seconds.items() if any(product in name for product in PRODUCTS))
    return within / sum(seconds.values())


def of_their_step(ours: Trained, theirs: Trained, samples: Sequence[Sample]) -> dict[str, str]:
    """Each part of ours and of theirs, as a share of their step: medians of a step each on the samples."""
    shares: list[dict[str, tuple[float, float]]] = []
    for number, sample in enumerate(samples):
        found = [parts(side, sample) for side in ((ours, theirs) if number % 2 else (theirs, ours))]
        mine, other = found if number % 2 else found[::-1]
        whole = sum(other.values())
        shares.append({part: (mine[part] / whole, other[part] / whole) for part in mine})
    return {
        part: "{:.2f}, {:.2f}".format(*map(statistics.median, zip(*(one[part] for one in shares), strict=True)))
        for part in shares[0]
    }


def head(what: str, bar: float) -> None:
    """Print the head of the table of steps."""
    print()
    table(
        what, "step: ours / theirs [quartiles]", f"at most {bar}", "our matrix products / their step",
        "losses, gradients apart", "pairs",
    )  # fmt: skip


def compare(
    what: str,
    ours: Trained,
    theirs: Trained,
    sample: Callable[[int], Sample],
    count: int,
    bar: float,
    gradients: float = TOLERANCE,
) -> dict[str, str] | None:
    """Print a row of the table; return the parts of a step that misses the bar.

    Args:
        sample: of a number, 0 to `count`; the first is compared, and warms up.
        gradients: as of `check_equal`.
    """
    apart = check_equal(what, ours, theirs, sample(0), gradients)
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(count + 1):
        actions = {name: partial(step, side, sample(number)) for name, side in (("ours", ours), ("theirs", theirs))}
        for name, seconds in in_turn(actions, number, time.thread_time).items():
            if number:
                times[name].append(seconds)
    found = ratios(times["ours"], times["theirs"])
    middle, share = statistics.median(found), products_share(ours, sample(0))
    missed = of_their_step(ours, theirs, [sample(number) for number in range(3)]) if middle > bar else None
    row(
        what, spread(found), "met" if missed is None else "missed", f"{share * middle:.2f} ({share:.0%} of ours)",
        "{:.0e}, {:.0e}".format(*apart), len(found),
    )  # fmt: skip
    return missed


def over(arguments: argparse.Namespace, what: str, bar: float, sides_of: Callable[[str], Iterable[Sides]]) -> None:
    """Print a table, headed `what`: every size, pair of sides and length; and one of where missed steps go."""
    missed: dict[str, Mapping[str, str]] = {}
    head(what, bar)
    for size in arguments.sizes:
        torch.manual_seed(arguments.seed)
        for name, ours, theirs, samples, gradients in sides_of(size):
            for length in arguments.lengths or LENGTHS:
                place = f"{name}{length}, {size}"
                if shares := compare(place, ours, theirs, samples(length), arguments.pairs, bar, gradients):
                    missed[place] = shares
    if missed:
        columns = next(iter(missed.values()))
        print()
        table("shares of their step: ours, theirs", *columns)
        for place, parts_of_step in missed.items():
            row(place, *parts_of_step.values())
