"""Where this thread's time of a run goes: methods of single objects are watched while it runs.

This thread does not run where it waits for a core, so other work on the machine counts little.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch


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
