#!/usr/bin/env python
"""Tries to break runs: kills and damages over tiny recipes of all kinds of stages.

    tests/tools/torture.py                              # 500 attempts of all kinds with seed 0
    tests/tools/torture.py --attempts 100 --seed 3      # other dice, fewer of them
    tests/tools/torture.py --kinds kill,damage --minutes 5
    tests/tools/torture.py --seed 3 --only 17           # attempt 17 of that seed again, with its story

Every attempt starts from a copy of an undisturbed run and has an answer that must come out: after a kill
the same command ends with equal weights, tokens and rows; after a damage it does so too, or a message names the file
and its cure leads to equal results. No attempt may end with a traceback. Prints how many were tried, held and failed by
kind, keeps the folder of each that failed with the command that repeats it, and exits with 1 where one failed. What
each kind does is said in `tests/tools/attempts/`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
from attempts import attempt as attempts
from attempts import reference as references
from attempts.attempt import Attempt, Broken
from attempts.kinds import KINDS
from freeze import ENVIRONMENT, preload

LONGEST_S = 700.0  # of an attempt, all of its commands together
_SUBREAPER = 36  # of prctl: what an attempt's processes leave behind becomes its child


def draw(seed: int, number: int, kinds: Iterable[str]) -> str:
    """The kind of an attempt."""
    names = list(kinds)
    return random.Random(f"{seed}/{number}").choices(names, [KINDS[name].weight for name in names])[0]


def try_one(one: Attempt) -> None:
    """The whole of an attempt, in a process of its own; its outcome goes to a file beside its folder."""
    os.setsid()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    begin = time.monotonic()
    how, problem = "", None
    one.folder.mkdir(parents=True)
    try:
        how = KINDS[one.kind].attempt(one)
    except Broken as broken:
        problem = str(broken)
    except Exception:
        problem = f"the harness itself: {traceback.format_exc()}"
    if problem is None:
        shutil.rmtree(one.folder, ignore_errors=True)
    attempts.report(one, how, problem, time.monotonic() - begin)


def end_with_children(pid: int) -> None:
    """Ends an attempt that hangs, and what it has started."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            one.kill()


class Harness:
    """Runs attempts side by side and keeps their outcomes."""

    def __init__(self, asked: argparse.Namespace, folder: Path):
        self.asked, self.folder, self.seed = asked, folder, 0
        self.kinds = asked.kinds.split(",") if asked.kinds else list(KINDS)
        self.outcomes: dict[int, dict[str, Any]] = {}
        self.references: Mapping[str, references.Reference] = {}

    def place(self, number: int) -> Path:
        """An attempt's folder; its outcome is a file beside it."""
        return self.folder / f"{self.seed}-{number:05d}"

    def prepare(self) -> None:
        """The undisturbed runs that these kinds of attempts start from."""
        names = self.asked.recipes.split(",") if self.asked.recipes else references.RECIPES
        place = self.folder / "references"
        self.references = {name: references.build(name, place / name, references.alone) for name in names}

    def run(self, seed: int) -> None:
        """All attempts of a seed, or those that begin before the time is up."""
        self.seed, self.outcomes = seed, {}
        fork = multiprocessing.get_context("fork")
        numbers = iter([self.asked.only] if self.asked.only is not None else range(self.asked.attempts))
        end = time.monotonic() + 60 * self.asked.minutes
        running: dict[int, Any] = {}
        while True:
            while len(running) < self.asked.jobs and time.monotonic() < end:
                number = next(numbers, None)
                if number is None:
                    end = 0.0
                    break
                kind = draw(self.seed, number, self.kinds)
                one = Attempt(kind, self.seed, number, self.place(number), self.references)
                process = fork.Process(target=try_one, args=(one,))
                process.start()
                running[number] = process, time.monotonic()
            if not running:
                return
            for number, (process, begun) in list(running.items()):
                if time.monotonic() - begun > LONGEST_S:
                    end_with_children(process.pid)
                if not process.is_alive():
                    process.join()
                    del running[number]
                    self.note(number)
            time.sleep(0.01)

    def note(self, number: int) -> None:
        """Keep an attempt's outcome, and say at once where it failed."""
        path = self.place(number).with_suffix(".json")
        value = json.loads(path.read_text()) if path.is_file() else {"kind": "?", "problem": "no outcome", "story": []}
        self.outcomes[number] = value
        if value["problem"] is None and self.asked.only is None:
            path.unlink()
            return
        if value["problem"] is not None:
            print(f"FAILED {value['kind']}: {value['problem']}\n  {self.repeat(number)}\n  {path}", flush=True)
        if self.asked.only is not None:
            print("\n".join(value["story"]), flush=True)

    def tell(self, seed: int) -> int:
        """Run a seed's attempts and print what came of them. Returns how many failed."""
        begin = time.monotonic()
        self.run(seed)
        failed = [number for number, outcome in sorted(self.outcomes.items()) if outcome["problem"] is not None]
        tried, seconds = len(self.outcomes), time.monotonic() - begin
        print(f"seed {seed}: {tried} tried, {tried - len(failed)} held, {len(failed)} failed; {seconds:.0f} s")
        print(self.table())
        for number in failed:
            print(f"failed: {self.repeat(number)}    # {self.place(number)}")
        sys.stdout.flush()
        return len(failed)

    def repeat(self, number: int) -> str:
        """The command that makes the same attempt again."""
        chosen = f" --kinds {self.asked.kinds}" if self.asked.kinds else ""
        chosen += f" --recipes {self.asked.recipes}" if self.asked.recipes else ""
        return f"tests/tools/torture.py --seed {self.seed} --only {number}{chosen}"

    def table(self) -> str:
        """Tried, held and failed by kind, and how those that held did."""
        lines = ["| kind | tried | held | failed | how |", "| --- | --- | --- | --- | --- |"]
        every = list(self.outcomes.values())
        for kind in [*self.kinds, "all"]:
            mine = [o for o in every if kind in (o["kind"], "all")]
            if not mine:
                continue
            failed = sum(o["problem"] is not None for o in mine)
            hows = Counter(o["how"] for o in mine if o["problem"] is None) if kind != "all" else {}
            told = "; ".join(f"{count} {how}" for how, count in sorted(hows.items(), key=lambda pair: -pair[1]))
            lines.append(f"| {kind} | {len(mine)} | {len(mine) - failed} | {failed} | {told} |")
        return "\n".join(lines)


def main() -> int:
    """Read the command line and try; returns 1 where an attempt failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="0", help="or several, with commas between (0)")
    parser.add_argument("--attempts", type=int, default=500, help="of each seed (500)")
    parser.add_argument("--kinds", help=f"of {','.join(KINDS)}; none: all")
    parser.add_argument("--recipes", help=f"of {','.join(references.RECIPES)}; none: all")
    parser.add_argument("--minutes", type=float, default=120.0, help="of each seed: no attempt begins after them (120)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="side by side (cores)")
    parser.add_argument("--only", type=int, help="this attempt alone")
    parser.add_argument("--folder", type=Path, help="to work in; failures stay there (a new one in the temporary)")
    asked = parser.parse_args()
    if unknown := set((asked.kinds or "").split(",")) - {"", *KINDS}:
        parser.error(f"no kind {', '.join(sorted(unknown))}")
    os.environ |= ENVIRONMENT
    preload()
    folder = (asked.folder or Path(tempfile.mkdtemp(prefix="torture-"))).absolute()
    harness = Harness(asked, folder)
    begin = time.monotonic()
    harness.prepare()
    print(f"undisturbed runs: {time.monotonic() - begin:.0f} s", flush=True)
    failed = sum(harness.tell(int(seed)) for seed in asked.seed.split(","))
    if not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
