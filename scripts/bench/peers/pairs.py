"""Neighbouring answers of two decoding loops: their cycles in turn, where ours goes, and equality.

A cycle runs from one pass of the target to the next: verification, what the loop does with it, and the next draft. The
prompt's pass is left out, and an answer is broken off before its end, which cuts the last trees. Times are this
thread's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from draftsmith.scripts.timing import ratios, row, spread, table
from torch.utils._python_dispatch import TorchDispatchMode

AT_512 = 0.88  # of any peer's cycle at width 512, where both sides multiply the same matrices for most of it
LONG = 64  # tokens of an answer that is broken off
# Parts of our cycle: what a part calls of another is the other's.
TARGET, DRAFT, SCORES = "the target's pass", "the draft's passes", "LM heads"
GROWING, DRAFTING, VERIFYING = "growing the tree", "the drafter around its passes", "verifying around the pass"
PARTS = (TARGET, DRAFT, SCORES, GROWING, DRAFTING, VERIFYING)
OWN_WORK = (TARGET, DRAFT, SCORES)  # the models'
REST = "loop"  # and the rule
COLUMNS = (
    "peer", "cycle: ours / theirs [quartiles]", "goal", "our models' own work / their cycle",
    "tau, ours and theirs", "equal greedy cycles", "pairs", "our products and attention alone / their cycle",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """Tokens of an answer, and how many drafted ones each cycle accepted."""

    tokens: list[int]
    accepted: list[int]
    before: int = 1  # tokens before the first cycle

    @property
    def cycles(self) -> dict[int, int]:
        """Where in the answer each cycle began -> what it accepted."""
        starts = itertools.accumulate((count + 1 for count in self.accepted), initial=self.before)
        return dict(zip(starts, self.accepted, strict=False))

    @property
    def tau(self) -> float:
        """Mean tokens of a cycle."""
        return 1 + statistics.mean(self.accepted)


Method = tuple[Any, str]  # an object and a method's name


@dataclass(frozen=True)
class Side:
    """One of the two loops."""

    passes: Sequence[Method]  # one of them is called in each cycle, and for the prompt
    answer: Callable[[int, int], Answer]  # (number of the request, tokens) -> so many or a few more
    parts: Mapping[str, Sequence[Method]] = field(default_factory=dict)  # part of a cycle -> what it is spent in


@dataclass(frozen=True)
class Profile:
    """Where our cycle goes in a row of the table."""

    what: str
    met: bool
    shares: dict[str, float]  # part -> share of the cycle


def watched(functions: Sequence[tuple[Any, str]], watch: Callable[[Callable], Callable]) -> ExitStack:
    """Methods (object, name) of single objects, each replaced by `watch` of it until the stack closes."""
    stack = ExitStack()
    for owner, name in functions:
        stack.enter_context(patch.dict(vars(owner), {name: watch(getattr(owner, name))}))
    return stack


class Meter:
    """This thread's seconds in named parts; what one part calls of another is the other's."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open, self._since = ["loop"], time.thread_time()

    def restart(self) -> None:
        """Forget all seconds so far."""
        self.seconds.clear()
        self._since = time.thread_time()

    def part(self, name: str) -> Callable[[Callable], Callable]:
        """A decorator that adds the time of a function's calls to part `name`."""

        def watch(function: Callable) -> Callable:
            def metered(*args: Any, **named: Any) -> Any:
                self._charge()
                self._open.append(name)
                try:
                    return function(*args, **named)
                finally:
                    self._charge()
                    self._open.pop()

            return metered

        return watch

    def shares(self) -> dict[str, float]:
        """Part -> its share of all seconds since the meter was made; shares sum to 1."""
        self._charge()
        total = sum(self.seconds.values())
        return {name: seconds / total for name, seconds in self.seconds.items()}

    def _charge(self) -> None:
        moment = time.thread_time()
        self.seconds[self._open[-1]] += moment - self._since
        self._since = moment


class _Enough(Exception):
    """The cycles that are timed are over."""


class _Cycles:
    """Counts passes: this thread's seconds of the timed cycles."""

    def __init__(self, cycles: int, meter: Any):
        self.cycles, self.meter = cycles, meter
        self.calls, self.begin, self.seconds = 0, 0.0, 0.0

    def watch(self, method: Callable) -> Callable:
        """`method`, with each of its calls counted first."""

        def counted(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == 2:  # after the prompt's
                self.meter.restart()
                self.begin = time.thread_time()
            elif self.calls == 2 + self.cycles:
                self.seconds = time.thread_time() - self.begin
                raise _Enough
            return method(*arguments, **named)

        return counted


def _run(side: Side, number: int, cycles: int, watcher: Any, *contexts: AbstractContextManager) -> float:
    """Seconds of a cycle of one answer. `watcher` restarts where the timed cycles begin, within `contexts`."""
    count = _Cycles(cycles, watcher)
    try:
        with ExitStack() as stack:
            for context in (*contexts, watched(side.passes, count.watch)):
                stack.enter_context(context)
            side.answer(number, LONG)
    except _Enough:
        return count.seconds / cycles
    raise SystemExit("an answer ended before its cycles")


def cycle_seconds(side: Side, number: int, cycles: int = 6) -> float:
    """Thread seconds of a cycle of one answer."""
    return _run(side, number, cycles, Meter())


def cycle_shares(side: Side, number: int, cycles: int) -> dict[str, float]:
    """The share of each part in the cycles of one answer."""
    meter = Meter()
    _run(side, number, cycles, meter, *(watched(methods, meter.part(part)) for part, methods in side.parts.items()))
    return meter.shares()


class _Products(TorchDispatchMode):
    """Keeps the calls of matrix products and attention since `restart`, with what they were given."""

    names = frozenset({"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "scaled_dot_product_attention",
                       "_scaled_dot_product_flash_attention_for_cpu"})  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        """Forget all calls so far."""
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in self.names:
            self.calls.append(partial(func, *args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def products_of(side: Side, number: int, cycles: int) -> list[Callable[[], Any]]:
    """The matrix products and attention of so many cycles of one answer, to be called again: no loop over the same
    models takes less than they do.
    """
    products = _Products()
    _run(side, number, cycles, products, products)
    return products.calls


@torch.inference_mode()
def replayed_seconds(calls: Sequence[Callable[[], Any]], cycles: int) -> float:
    """Thread seconds of the calls of a cycle, one after the other."""
    begin = time.thread_time()
    for call in calls:
        call()
    return (time.thread_time() - begin) / cycles


def compare(
    what: str, ours: Side, theirs: Side, arguments: argparse.Namespace, *, goal: float, equal: bool = True
) -> Profile:
    """Print a row of the table, and return where our cycle goes.

    Args:
        goal: the most of a peer's cycle at the demo's size; at width 512 it is `AT_512`.
        equal: answers are compared first, token by token and cycle by cycle; those of sampled decoding cannot be.
    """
    cycles, taus = check_equal(what, ours, theirs, arguments, equal=equal)
    found: tuple[list[float], list[float], list[float]] = ([], [], [])  # ours, theirs, our products alone
    products = products_of(ours, 1, arguments.cycles)
    for number in range(arguments.pairs + 1):
        for index in (0, 1) if number % 2 else (1, 0):
            seconds = cycle_seconds((ours, theirs)[index], number, arguments.cycles)
            if number:  # the first warms up
                found[index].append(seconds)
        found[2].append(replayed_seconds(products, arguments.cycles))
    metered = [cycle_shares(ours, number, arguments.cycles) for number in range(1, 4)]
    shares = {part: statistics.median(run.get(part, 0.0) for run in metered) for part in (*ours.parts, REST)}
    own = sum(shares[part] for part in OWN_WORK)
    pairs, alone = ratios(*found[:2]), statistics.median(ratios(found[2][1:], found[1]))
    middle, goal = statistics.median(pairs), AT_512 if "width 512" in what else goal
    row(
        what, spread(pairs), f"{goal:.2f}, {'met' if middle <= goal else 'missed'}",
        f"{own * middle:.2f} ({own:.0%} of ours)",
        "{:.2f}, {:.2f}".format(*taus), cycles or "", len(pairs), f"{alone:.2f}",
    )  # fmt: skip
    return Profile(what, middle <= goal, shares)


def check_equal(
    what: str, ours: Side, theirs: Side, arguments: argparse.Namespace, *, equal: bool
) -> tuple[int, tuple[float, float]]:
    """Compare greedy answers: each token, and how many drafted ones each cycle accepts that begins at the same place
    (transformers' first one begins a token earlier). Returns the number of such cycles, and both taus.

    Ours are longer, so that no tree is cut which theirs is compared with.

    Raises:
        SystemExit: they differ.
    """
    cycles, answers = 0, []
    for number in range(100, 100 + arguments.checked):
        mine, other = ours.answer(number, arguments.tokens + 8), theirs.answer(number, arguments.tokens)
        answers.append((mine, other))
        if not equal:
            continue
        count = len(other.tokens)
        if mine.tokens[:count] != other.tokens:
            raise SystemExit(f"{what}: other tokens\nours   {mine.tokens[:count]}\ntheirs {other.tokens}")
        shared = mine.cycles.keys() & other.cycles.keys()
        if any(mine.cycles[start] != other.cycles[start] for start in shared):
            raise SystemExit(f"{what}: other accepted lengths\nours   {mine.cycles}\ntheirs {other.cycles}")
        cycles += len(shared)
    taus = [statistics.mean(answer.tau for answer in side) for side in zip(*answers, strict=True)]
    return cycles, (taus[0], taus[1])


def head() -> None:
    """Print the head of the table."""
    table(*COLUMNS)


def profiles(rows: Sequence[Profile]) -> None:
    """Print where our cycle goes in the rows that miss the bar."""
    if missed := [profile for profile in rows if not profile.met]:
        print()
        table("share of our cycle (medians of 3 metered answers)", *PARTS, REST)
        for profile in missed:
            row(profile.what, *(f"{profile.shares[part]:.0%}" for part in (*PARTS, REST)))
