"""Neighbouring answers of two decoding loops: their cycles in turn, what of ours is the models' own work, and equality.

A cycle runs from one pass of the target to the next: verification, what the loop does with it, and the next draft. The
prompt's pass is left out, and an answer is broken off before its end, which cuts the last trees. Times are this
thread's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.eval.timing import ratios, row, spread, table
from torch import nn

BAR = 0.75  # of a peer's cycle
LONG = 64  # tokens of an answer that is broken off
COLUMNS = (
    "peer", "cycle: ours / theirs [quartiles]", f"at most {BAR}", "our models' own work / their cycle",
    "tau, ours and theirs", "equal greedy cycles", "pairs",
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


@dataclass(frozen=True)
class Side:
    """One of the two loops."""

    passes: nn.Module  # called once in each cycle, and for the prompt
    answer: Callable[[int, int], Answer]  # (number of the request, tokens) -> so many or a few more
    models: Sequence[nn.Module] = ()  # that do the models' own work, none within another


class _Enough(Exception):
    """The cycles that are timed are over."""


class _Hooks:
    """This thread's seconds of the timed cycles and, where some are given, within modules."""

    def __init__(self, side: Side, cycles: int, *, metered: bool):
        self.cycles = cycles
        self.calls, self.begin, self.seconds, self.within = 0, 0.0, 0.0, 0.0
        self._handles = [side.passes.register_forward_pre_hook(self._count)]
        for module in side.models if metered else ():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave))

    def _count(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == 2:  # behind the prompt's
            self.begin, self.within = time.thread_time(), 0.0
        elif self.calls == 2 + self.cycles:
            self.seconds = time.thread_time() - self.begin
            raise _Enough

    def _enter(self, *_: Any) -> None:
        self.within -= time.thread_time()

    def _leave(self, *_: Any) -> None:
        self.within += time.thread_time()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _run(side: Side, number: int, cycles: int, *, metered: bool = False) -> tuple[float, float]:
    """Seconds of a cycle, and of them within the models."""
    hooks = _Hooks(side, cycles, metered=metered)
    try:
        side.answer(number, LONG)
    except _Enough:
        return hooks.seconds / cycles, hooks.within / cycles
    finally:
        hooks.remove()
    raise SystemExit("an answer ended before its cycles")


def cycle_seconds(side: Side, number: int, cycles: int = 6) -> float:
    """Thread seconds of a cycle of one answer."""
    return _run(side, number, cycles)[0]


def compare(what: str, ours: Side, theirs: Side, arguments: argparse.Namespace, *, equal: bool = True) -> None:
    """Print a row of the table.

    Args:
        equal: answers are compared first, token by token and cycle by cycle; those of sampled decoding cannot be.
    """
    cycles, taus = check_equal(what, ours, theirs, arguments, equal=equal)
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(arguments.pairs + 1):
        for index in (0, 1) if number % 2 else (1, 0):
            seconds = cycle_seconds((ours, theirs)[index], number, arguments.cycles)
            if number:  # the first warms up
                found[index].append(seconds)
    metered = [_run(ours, number, arguments.cycles, metered=True) for number in range(1, 4)]
    share = statistics.median(within / seconds for seconds, within in metered)
    pairs = ratios(*found)
    middle = statistics.median(pairs)
    row(
        what, spread(pairs), "met" if middle <= BAR else "missed", f"{share * middle:.2f} ({share:.0%} of ours)",
        "{:.2f}, {:.2f}".format(*taus), cycles or "", len(pairs),
    )  # fmt: skip


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
