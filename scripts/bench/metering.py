"""Two clocks, and where the time of a run goes: methods of single objects are watched while it runs.

On a CPU the time of this thread alone counts beside the wall's: it does not run where the thread waits for a core.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from draftsmith.scripts.timing import row, spread, wall


def one_thread() -> bool:
    """Whether all work is this thread's, so that its own time tells something."""
    return not torch.cuda.is_available() and torch.get_num_threads() == 1


def both() -> np.ndarray:
    """[2] seconds: wall, and this thread's alone (not a number where others work for it)."""
    return np.array([wall(), time.thread_time() if one_thread() else np.nan])


def compared(what: str, bound: str, ratios: Sequence[np.ndarray], **style: Any) -> None:
    """Print ratios of neighbouring runs, each [2] for the two clocks."""
    row(what, bound, *(spread([r[clock] for r in ratios], **style) for clock in (0, 1)), len(ratios))


def own_clock(share: float) -> np.ndarray:
    """[2] a metered share, under the clock that `Meter` reads."""
    return np.array([np.nan, share] if one_thread() else [share, np.nan])


PERCENT: dict[str, Any] = {"digits": 2, "scale": 100.0, "unit": "%"}


def watched(functions: Sequence[tuple[Any, str]], watch: Callable[[Callable], Callable]) -> ExitStack:
    """Methods (object, name) of single objects, each replaced by `watch` of it until the stack closes."""
    stack = ExitStack()
    for owner, name in functions:
        stack.enter_context(patch.dict(vars(owner), {name: watch(getattr(owner, name))}))
    return stack


class Meter:
    """Seconds of named parts by the better clock; what one part calls of another is the other's."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open, self._since = ["loop"], self._now()

    def restart(self) -> None:
        """Forget all seconds so far."""
        self.seconds.clear()
        self._since = self._now()

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
        moment = self._now()
        self.seconds[self._open[-1]] += moment - self._since
        self._since = moment

    @staticmethod
    def _now() -> float:
        return time.thread_time() if one_thread() else wall()
