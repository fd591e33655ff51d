"""What a person watches while a stage runs: two live rows on a terminal, and a line now and then elsewhere.

The first row has the stage, its purpose and what is left of the run; the second its progress, the time left at its
current rate, and its latest numbers (loss and accuracy, or tau so far).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import psutil
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment

from ...core import ranks
from ...core.secrets import redact

STEP = "step"  # what trainings count
_EVERY_S = 10.0  # between two lines of a training where nobody watches
_TOLD_S = 30.0  # and of other stages
_LOOKED_S = 3.0  # that a stage must have worked before its rate is told
_Item = TypeVar("_Item")
# Seconds of an optimizer step, in a training that has a rate -> seconds of later stages that are known, and how many
# stages have no known time; None: none has one.
Behind = Callable[[float | None], tuple[float, int] | None]


class StageLine:
    """How far a stage is. Of the ranks, rank 0 alone shows it.

    Args:
        name: of the stage.
        about: the purpose of the stage.
        place: which stage of how many this is.
        live: whether a terminal shows rows that change; None: what `watched` says.
        behind: what is known of the time of later stages; None: nothing.
    """

    def __init__(
        self,
        name: str,
        about: str = "",
        place: tuple[int, int] = (1, 1),
        *,
        live: bool | None = None,
        behind: Behind | None = None,
    ):
        self.name, self._about, self._place = name, redact(about), place
        self._is_live = (watched() if live is None else live) and ranks.is_main()
        self._behind = behind
        self._began = time.monotonic()
        self._unit, self._done, self._total, self._is_all = "", 0, 0, True
        self._first, self._counted_from = 0, self._began  # what was done before this process counted, and since when
        self._advanced = self._began  # when the last one was done
        self._notes: list[str] = []  # the latest numbers, the most important first
        self._printed, self._told = 0.0, self._began

    @contextmanager
    def shown(self) -> Iterator[StageLine]:
        """While this is entered, the terminal shows the rows; what is printed meanwhile stands above them."""
        if not self._is_live:
            yield self
            return
        console = _Terminal(
            file=sys.stdout, soft_wrap=True, highlight=False
        )  # long messages are the terminal's to wrap
        # What goes to a file (`2> log`) goes on to the file.
        with Live(self, console=console, refresh_per_second=2, redirect_stderr=sys.stderr.isatty()):
            yield self

    def count(self, unit: str, total: int, done: int = 0, *, is_share: bool = False, is_all: bool = True) -> None:
        """The stage has `total` of these to do, of which an earlier process did `done`.

        Args:
            is_share: the total is this rank's share of them.
            is_all: nothing else follows that takes time; else no time left is told.
        """
        self._unit = f"rank {ranks.rank()}'s {unit}" if is_share and ranks.world_size() > 1 else unit
        self._total, self._done, self._first, self._is_all = total, done, done, is_all
        self._counted_from = time.monotonic()

    def skip(self, done: int) -> None:
        """So many more were done by an earlier process."""
        self._done, self._first = self._done + done, self._first + done

    def add(self, count: int) -> None:
        """So many more are done."""
        self.advance(self._done + count)

    def counted(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items; each counts as done when the next one is asked for."""
        for item in items:
            yield item
            self.advance()

    def advance(self, done: int | None = None) -> None:
        """So many are done; None: one more."""
        self._done = self._done + 1 if done is None else done
        self._advanced = time.monotonic()
        ranks.pulse().advance(f"{self._unit} {self._done} of {self._total}")
        self._tell()

    def log(self, values: dict[str, float], step: int) -> None:
        """Numbers of a training. Values without a loss are a validation's and are printed at once."""
        if not ranks.is_main():
            return
        if "loss" not in values:
            text = " ".join(f"{name.removeprefix('val_')} {value:.4f}" for name, value in values.items())
            print(f"{self.name} {step}/{self._total} validation: {text}", flush=True)
            return
        self._notes = [
            f"loss {values['loss']:.4f}",
            *(f"{name} {values[name]:.3f}" for name in ("accuracy", "top1", "top3") if name in values),
            f"{values['samples_per_s']:.1f} samples/s",
            f"{values['tokens_per_s']:.0f} tokens/s",
            f"{_memory_gib():.1f} GiB",
        ]
        if not self._is_live and (time.monotonic() - self._printed > _EVERY_S or step == self._total):
            self._printed = time.monotonic()
            print(f"{self.name} {step}/{self._total} {' '.join(self._notes)}", flush=True)

    def note(self, *numbers: str) -> None:
        """The latest numbers of a stage that trains nothing."""
        self._notes = [*numbers]
        self._tell()

    def _tell(self) -> None:
        """Where nobody watches, print how far a stage that trains nothing is, if it was long ago."""
        is_told = not self._is_live and ranks.is_main() and self._unit not in ("", STEP)
        if is_told and time.monotonic() - self._told > _TOLD_S:
            self._told = time.monotonic()
            print(f"{self.name} {' · '.join([*self._far(), *self._notes])}", flush=True)

    def rows(self, width: int) -> list[str]:
        """One row until something is counted, then two, each in at most `width` cells of a terminal. Of the first what
        the stage is for is cut, and then what is left of the run; of the second the last numbers go.
        """
        number, of = self._place
        left = self._left()
        head, gone = f"stage {number} of {of} · {self.name}", time.monotonic() - self._began
        if not self._unit:
            return [self._first_row(head, clock(gone), width)]
        far, short = self._far()
        long = f"{short} of about {clock(gone + left)}" if left else short
        # Loss and accuracy are missed more than the stage's whole time, and the rest less.
        notes, most = self._notes, min(2, len(self._notes))
        forms = [*((long, n) for n in range(len(notes), most - 1, -1)), *((short, n) for n in range(most, -1, -1))]
        seconds = [" · ".join([far, how_long, *notes[:count]]) for how_long, count in forms]
        second = next((row for row in seconds if cell_len(row) <= width), None) or _cut(seconds[-1], width)
        return [self._first_row(head, self._of_run(left), width), second]

    def _far(self) -> tuple[str, str]:
        """How many are done, and the time left, or gone."""
        left = self._left()
        far = f"{self._unit} {self._done:,}/{self._total:,}" if self._total else f"{self._unit} {self._done:,}"
        return far, f"{clock(left)} left" if left else clock(time.monotonic() - self._began)

    def _first_row(self, head: str, tail: str, width: int) -> str:
        ends = f" · {tail}" if tail and cell_len(head) + 3 + cell_len(tail) <= width else ""
        room = width - cell_len(head) - cell_len(ends)
        about = f": {self._about}" if self._about else ""
        if cell_len(about) > room and room <= 20 and ends:  # rather what it is for than what is left of the run
            ends, room = "", width - cell_len(head)
        if cell_len(about) > room:
            about = _cut(about, room) if room > 20 else ""
        row = head + about + ends
        return row if cell_len(row) <= width else _cut(row, width)

    def _left(self) -> float | None:
        """Seconds of this stage, at the rate of this process: what an earlier one did took a time that is not known.

        None: it has no rate yet. 0: all is done.
        """
        counted, done = self._advanced - self._counted_from, self._done - self._first
        if not self._is_all or not self._total or done < 1 or counted < _LOOKED_S:
            return None
        if self._done >= self._total:
            return 0.0
        # Between two updates it counts down, by the one that is under way at most.
        each = counted / done
        return each * (self._total - self._done) - min(time.monotonic() - self._advanced, each)

    def _of_run(self, left: float | None) -> str:
        """What is left of the run: this stage, and the optimizer steps of later ones at the rates of this run."""
        if self._behind is None or left is None:
            return ""
        is_training = self._unit == STEP
        step_s = (self._advanced - self._counted_from) / (self._done - self._first) if is_training else None
        if (known := self._behind(step_s)) is None:
            return ""
        seconds, others = known
        untimed = f" + {others} stage{'s' * (others > 1)} without a rate" if others else ""
        return f"run: about {clock(left + seconds)} left{untimed}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # A terminal that writes into its last column begins a new line, so that one stays free. Never as markup.
        for number, row in enumerate(self.rows(options.max_width - 1)):
            if number:
                yield Segment.line()
            yield Segment(row)


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


def _cut(text: str, width: int) -> str:
    """A text that is longer, in `width` cells: a character of some scripts takes two."""
    return f"{set_cell_size(text, width - 1).rstrip()}…"


def of_shards(total: int, per_shard: int, mine: Collection[int], left: Collection[int]) -> tuple[int, int]:
    """How many samples this rank's shards have, and how many of them lie in shards that an earlier process finished.

    Args:
        total: samples of all shards, `per_shard` in each but the last.
        mine: indices of this rank's shards.
        left: those of them that are not finished.
    """
    sizes = {index: min(per_shard, total - index * per_shard) for index in mine}
    return sum(sizes.values()), sum(size for index, size in sizes.items() if index not in left)


def clock(seconds: float) -> str:
    """0:41, 12:05, 3:07:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _memory_gib() -> float:
    """The memory of this rank: the GPU's peak where there is one, else what the process holds."""
    import torch  # not for a line that shows no training

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return psutil.Process().memory_info().rss / 2**30
