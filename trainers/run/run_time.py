"""The time left of a whole run, as far as its own measurements tell: of optimizer steps to come, and of nothing else.

A stage of another kind, or a training of which this process has measured no step, has no rate. Nothing is made up for
it: it is counted as not timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .stage import Planned


@dataclass
class RunTime:
    """What the stages of a run take. Of rank 0, which shows it.

    Args:
        stages: those that this run has to do, in order.
    """

    stages: Sequence[Planned]
    _row_s: dict[tuple[str, ...], float] = field(default_factory=dict)  # what is trained -> seconds of a row

    def behind(self, name: str, step_s: float | None) -> tuple[float, int] | None:
        """Seconds of the optimizer steps of later stages, and how many later stages have no known time.

        None: no later stage has one.

        Args:
            name: of the stage that runs.
            step_s: what its optimizer step takes; None: not known, or it trains nothing.
        """
        place = next((number for number, planned in enumerate(self.stages) if planned.name == name), None)
        if place is None:
            return None
        now, later = self.stages[place], self.stages[place + 1 :]
        if step_s is not None and (training := now.stage.training(now)) is not None:
            self._row_s[training.what] = step_s / training.batch_size
        known = [seconds for planned in later if (seconds := self._seconds(planned)) is not None]
        return (sum(known), len(later) - len(known)) if known else None

    def _seconds(self, planned: Planned) -> float | None:
        training = planned.stage.training(planned)
        if training is None or training.steps is None or training.what not in self._row_s:
            return None
        return training.steps * training.batch_size * self._row_s[training.what]
