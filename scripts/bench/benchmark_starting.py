#!/usr/bin/env python
"""CPU seconds, of user and system, that the command line takes until it has printed its help or a dry run.

    scripts/bench/benchmark_starting.py              prints a section for docs/results/benchmarks.md

The commands take turns; each is a process of its own, as a user starts it. The first round is not counted: it reads
files from the disk.
"""

import os
import resource
import statistics
import subprocess
import sys

from draftsmith.scripts import timing

COMMANDS = {
    "draftsmith --help": (["--help"], 0.5),
    "draftsmith show llava15-68m": (["show", "llava15-68m"], 1.0),
    "draftsmith train recipe=llava15-68m dry_run=true": (["train", "recipe=llava15-68m", "dry_run=true"], 3.0),
    "draftsmith train recipe=demo/lvlm dry_run=true": (["train", "recipe=demo/lvlm", "dry_run=true"], 3.0),
}


def cpu_seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have compiled files, and so has a checkout
    command = [sys.executable, "-m", "draftsmith", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints a line for each command: its bound, and median and range of its CPU seconds."""
    parser = timing.options(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    timing.header(f"n {rounds}")
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(rounds + 1):
        for name, (arguments, _) in COMMANDS.items():
            found = cpu_seconds(arguments)
            seconds[name] += [found] if turn else []
    timing.table("command", "bound, CPU seconds", "median (range)")
    for name, (_, bound) in COMMANDS.items():
        middle = statistics.median(seconds[name])
        shown = f"{middle:.2f} ({min(seconds[name]):.2f} to {max(seconds[name]):.2f})"
        timing.row(f"`{name}`", bound, shown if middle <= bound else f"**{shown}: missed**")


if __name__ == "__main__":
    main()
