"""What a person watches while a stage runs: two live rows on a terminal, and a line now and then elsewhere.

The first row has the stage and its purpose; the second its progress, the time left at its current rate, and its latest
numbers (loss and accuracy, or tau so far).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import psutil
from rich.console import Console, RenderableType
from rich.progress import MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from ...core import ranks
from ...core.secrets import redact

STEP = "step"  # what trainings count
_TRAINING_LINE_S = 10.0  # between two lines of a training where nobody watches
_LINE_S = 30.0  # and of other stages
_RATE_S = 3600.0  # that a rate is a mean over: some stages take minutes for one item
_Item = TypeVar("_Item")


class StageLine:
    """How far a stage is, which is at `place` of how many. Of the ranks, rank 0 alone shows it. `live` says whether a
    terminal shows rows that change; None: what `watched` says.
    """

    def __init__(self, name: str, about: str = "", place: tuple[int, int] = (1, 1), *, live: bool | None = None):
        self.name = name
        self._is_live = (watched() if live is None else live) and ranks.is_main()
        number, of = place
        self._rows = _Rows(f"stage {number} of {of} · {name}{': ' if about else ''}{redact(about)}", self._is_live)
        self._task_id = self._rows.add_task("", total=None, visible=False, notes="")
        self._printed = time.monotonic()

    def shown(self) -> AbstractContextManager[object]:
        """While this is entered, the terminal shows the rows; what is printed meanwhile stands above them."""
        return self._rows

    @property
    def _task(self) -> Task:
        return self._rows.tasks[0]

    def count(self, unit: str, total: int, done: int = 0, *, is_share: bool = False) -> None:
        """The stage, or this rank (`is_share`), has `total` of these to do, of which an earlier process did `done`."""
        unit = f"rank {ranks.rank()}'s {unit}" if is_share and ranks.world_size() > 1 else unit
        self._rows.remove_task(self._task_id)
        self._task_id = self._rows.add_task(unit, total=total or None, completed=done, notes="")

    def skip(self, done: int) -> None:
        """So many more were done by an earlier process: they do not enter the rate."""
        self._task.completed += done

    def counted(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items; each counts as done when the next one is asked for."""
        for item in items:
            yield item
            self.advance()

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        self._rows.advance(self._task_id, count)
        task = self._task
        ranks.pulse().advance(f"{task.description} {int(task.completed)} of {task.total or 0}")
        if task.description != STEP:
            self._print(_LINE_S)

    def log(self, values: dict[str, float], step: int) -> None:
        """Numbers of a training. Values without a loss are a validation's and are printed at once."""
        if not ranks.is_main():
            return
        if "loss" not in values:
            text = " ".join(f"{name.removeprefix('val_')} {value:.4f}" for name, value in values.items())
            print(f"{self.name} {step}/{self._task.total} validation: {text}", flush=True)
            return
        import torch  # not for a line that shows no training

        is_on_gpu = torch.cuda.is_available()  # whose peak is told, and else what the process holds
        memory = torch.cuda.max_memory_allocated() if is_on_gpu else psutil.Process().memory_info().rss
        notes = [
            f"loss {values['loss']:.4f}",
            *(f"{name} {values[name]:.3f}" for name in ("accuracy", "top1", "top3") if name in values),
            f"{values['samples_per_s']:.1f} samples/s",
            f"{values['tokens_per_s']:.0f} tokens/s",
            f"{memory / 2**30:.1f} GiB",
        ]
        self._rows.update(self._task_id, notes=" · ".join(notes))
        self._print(0.0 if step in (1, self._task.total) else _TRAINING_LINE_S)

    def note(self, *numbers: str) -> None:
        """The latest numbers of a stage that trains nothing."""
        self._rows.update(self._task_id, notes=" · ".join(numbers))
        self._print(_LINE_S)

    def _print(self, every_s: float) -> None:
        """Where nobody watches, and the last line is that old."""
        task, now = self._task, time.monotonic()
        if self._is_live or not ranks.is_main() or now - self._printed < every_s:
            return
        self._printed = now
        far = f"{int(task.completed):,}" + (f"/{task.total:,}" if task.total else "")
        left = f"{clock(task.time_remaining)} left" if task.time_remaining else clock(task.elapsed or 0.0)
        parts = (f"{self.name} {task.description} {far}", left, task.fields["notes"])
        print(" · ".join(filter(None, parts)), flush=True)


class _Rows(Progress):
    """A title, and below it one task."""

    def __init__(self, title: str, is_live: bool):
        self._title = Text(title, no_wrap=True, overflow="ellipsis")
        super().__init__(
            TextColumn("{task.description}", markup=False),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            # The most important numbers come first: where a terminal is narrow, the last ones are cut.
            TextColumn("{task.fields[notes]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=_Terminal(file=sys.stdout, soft_wrap=True, highlight=False),  # a terminal wraps messages
            refresh_per_second=2,
            speed_estimate_period=_RATE_S,
            redirect_stderr=sys.stderr.isatty(),  # what goes to a file (`2> log`) goes on to the file
            get_time=time.monotonic,
            disable=not is_live,
        )

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self._title
        yield self.make_tasks_table(self.tasks)


class _Terminal(Console):
    """Leaves the cursor as it is: a process that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


def watched() -> bool:
    """Whether a person sees the output of this process on a terminal that can change a line.

    `TERM=dumb` switches the live line off, and so does a continuous integration (`CI`), whose terminals are logs.
    """
    stream: object = sys.stdout
    is_terminal = getattr(stream, "isatty", lambda: False)()
    return bool(is_terminal and os.environ.get("TERM", "") not in ("", "dumb", "unknown") and not os.environ.get("CI"))


def of_shards(total: int, per_shard: int, mine: Collection[int], left: Collection[int]) -> tuple[int, int]:
    """How many samples this rank's shards have, and how many of them lie in shards that an earlier process finished.
    Shards hold `per_shard` of the `total` samples each; of this rank's (`mine`), some are not finished (`left`).
    """
    sizes = {index: min(per_shard, total - index * per_shard) for index in mine}
    return sum(sizes.values()), sum(size for index, size in sizes.items() if index not in left)


def clock(seconds: float) -> str:
    """0:41, 12:05, 3:07:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
