"""Functions of all benchmarks: alternating runs, medians with quartiles, and printed tables.

Machines are shared and warm up: only ratios of neighbours within one process say something, so nothing is timed alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from draftsmith.core.secrets import redact_argument

Name = TypeVar("Name", bound=Hashable)
Action = Callable[[], Any]
Clock = Callable[[], float]  # the moment in seconds


def options(description: str | None) -> argparse.ArgumentParser:
    """A command line whose help is the script's docstring, as it is."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def device() -> torch.device:
    """CUDA where there is any."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wall() -> float:
    """Seconds, after the device has finished: CUDA runs behind."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(action: Action, clock: Clock = wall) -> float:
    """Seconds that `action` takes, as `clock` counts them."""
    start = clock()
    action()
    return clock() - start


def in_turn(actions: Mapping[Name, Action], number: int, clock: Clock = wall) -> dict[Name, float]:
    """Times of one run of each, back to back; which one goes first changes with `number`."""
    names = list(actions) if number % 2 else list(actions)[::-1]
    return {name: timed(actions[name], clock) for name in names}


def rounds(actions: Mapping[Name, Action], count: int, *, warm_up: int = 1) -> dict[Name, list[float]]:
    """Wall seconds of each in `count` rounds of all, after `warm_up` that do not count.

    Entry i of every list is of round i, so that ratios of neighbours are taken entry by entry.
    """
    times: dict[Name, list[float]] = {name: [] for name in actions}
    for number in range(warm_up + count):
        for name, seconds in in_turn(actions, number).items():
            if number >= warm_up:
                times[name].append(seconds)
    return times


def ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    """Divide neighbours, pair by pair."""
    return [a / b for a, b in zip(these, those, strict=True)]


def median(values: Sequence[float], scale: float = 1.0) -> float | tuple[float, float, float]:
    """Median and quartiles, as a column of kind interval takes them."""
    if len(values) == 1:
        return scale * values[0]
    low, middle, high = (scale * v for v in statistics.quantiles(values, n=4, method="inclusive"))
    return middle, low, high


def spread(values: Sequence[float], scale: float = 1.0) -> str:
    """Median with quartiles as text."""
    value = median(values, scale)
    middle, *ends = value if isinstance(value, tuple) else (value,)
    return f"{middle:.3f}" + (f" [{', '.join(f'{end:.3f}' for end in ends)}]" if ends else "")


def machine() -> str:
    """Device, threads, load, torch and date, as benchmark sections name them."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    threads = torch.get_num_threads()
    return (
        f"{name}, {threads} {'thread' if threads == 1 else 'threads'}, load {os.getloadavg()[0]:.1f}, "
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )


def command() -> str:
    """This process's command line, as one types it in the repository."""
    threads = [f"OMP_NUM_THREADS={n}"] if (n := os.environ.get("OMP_NUM_THREADS")) else []
    script = re.sub(r".*/(?=scripts/)", "", sys.argv[0])
    return " ".join([*threads, script, *map(redact_argument, sys.argv[1:])])


def header(settings: str) -> None:
    """Print the line above a benchmark's tables: what was run, where, and with which settings."""
    print(f"`{command()}`: {machine()}, {settings}\n")


def table(*columns: str) -> None:
    """Print the head of a Markdown table."""
    row(*columns)
    row(*["---"] * len(columns))


def row(*cells: object) -> None:
    """Print a line of a Markdown table at once: the next one may take minutes."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
