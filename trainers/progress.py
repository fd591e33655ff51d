"""The line that a person watches: steps, loss, samples and tokens per second, time left, memory."""

from __future__ import annotations

import sys
import time

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ..core import ranks


class Progress:
    """Rank 0 draws a bar on a terminal and prints a line every ten seconds elsewhere."""

    def __init__(self, name: str, total_steps: int):
        self.name, self.total = name, total_steps
        self._live = sys.stderr.isatty()
        self._printed = 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True))
        self._task = self._bar.add_task(name, total=total_steps, note="")

    def __enter__(self) -> Progress:
        if self._live and ranks.is_main():
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live and ranks.is_main():
            self._bar.stop()

    def update(self, values: dict[str, float], step: int) -> None:
        """Show step `step`. Values without a loss are a validation's and are printed at once."""
        if "loss" not in values:
            self._say_validation(values, step)
            return
        note = " ".join(
            (
                f"loss {values['loss']:.4f}",
                *(f"{name} {values[name]:.3f}" for name in ("accuracy", "top1", "top3") if name in values),
                f"{values['samples_per_s']:.1f} samples/s",
                f"{values['tokens_per_s']:.0f} tokens/s",
                f"{_memory_gib():.1f} GiB",
            )
        )
        if not ranks.is_main():
            return
        if self._live:
            self._bar.update(self._task, completed=step, note=note)
        elif time.monotonic() - self._printed > 10 or step == self.total:
            self._printed = time.monotonic()
            print(f"{self.name} {step}/{self.total} {note}", flush=True)

    def _say_validation(self, values: dict[str, float], step: int) -> None:
        if ranks.is_main():
            text = " ".join(f"{name.removeprefix('val_')} {value:.4f}" for name, value in values.items())
            self._bar.console.print(f"{self.name} {step}/{self.total} validation: {text}", highlight=False)


def _memory_gib() -> float:
    """Of this rank: the GPU's peak where there is one, else what the process holds."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return psutil.Process().memory_info().rss / 2**30
