#!/usr/bin/env python
"""Tries to break runs: kills and damages over tiny recipes of all kinds of stages.

    tests/tools/torture.py                              # 500 attempts of all kinds with seed 0
    tests/tools/torture.py --attempts 100 --seed 3      # other dice, fewer of them
    tests/tools/torture.py --kinds kill,damage
    tests/tools/torture.py --seed 3 --only 17           # attempt 17 of that seed again, with its story

Every attempt starts from a copy of an undisturbed run and has an answer that must come out: after a kill
the same command ends with equal weights, tokens and rows; after a damage it does so too, or a message names the file
and its cure leads to equal results. No attempt may end with a traceback. Prints how many were tried, held and failed by
kind, keeps the folder of each that failed, with its story and the command that repeats it, and exits with 1 where one
failed. What each kind does is said in `tests/tools/attempts/`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attempts import reference as references
from attempts.attempt import Attempt, Broken, Outcome
from attempts.kinds import KINDS
from freeze import ENVIRONMENT, preload


def draw(seed: int, number: int, kinds: Sequence[str]) -> str:
    """The kind of an attempt."""
    return random.Random(f"{seed}/{number}").choices(kinds, [KINDS[name].weight for name in kinds])[0]


def try_one(one: Attempt) -> Outcome:
    """The whole of an attempt. Its folder stays where it failed."""
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
    return Outcome(one, how, problem)


def run_seed(
    seed: int, options: argparse.Namespace, folder: Path, undisturbed: Mapping[str, references.Reference]
) -> int:
    """Run a seed's attempts side by side and print what came of them. Returns how many failed."""
    begin, outcomes = time.monotonic(), list[Outcome]()
    kinds = options.kinds.split(",")
    numbers = range(options.attempts) if options.only is None else [options.only]
    attempts = [Attempt(draw(seed, n, kinds), seed, n, folder / f"{seed}-{n:05d}", undisturbed) for n in numbers]
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for outcome in pool.imap_unordered(try_one, attempts):
            outcomes.append(outcome)
            one = outcome.attempt
            if outcome.problem is not None:
                print(f"FAILED {one.kind}: {outcome.problem}\n  {repeat(one, options)}    # {one.folder}", flush=True)
            if outcome.problem is not None or options.only is not None:
                print("\n".join(one.story), flush=True)
    failed = sum(outcome.problem is not None for outcome in outcomes)
    tried = len(outcomes)
    print(f"seed {seed}: {tried} tried, {tried - failed} held, {failed} failed; {time.monotonic() - begin:.0f} s")
    print(table(outcomes, kinds), flush=True)
    return failed


def repeat(one: Attempt, options: argparse.Namespace) -> str:
    """The command that makes the same attempt again."""
    chosen = f"--kinds {options.kinds} --recipes {options.recipes}"
    return f"tests/tools/torture.py --seed {one.seed} --only {one.number} {chosen}"


def table(outcomes: Sequence[Outcome], kinds: Iterable[str]) -> str:
    """Tried, held and failed by kind, and how those that held did."""
    lines = ["| kind | tried | held | failed | how |", "| --- | --- | --- | --- | --- |"]
    for kind in kinds:
        mine = [outcome for outcome in outcomes if outcome.attempt.kind == kind]
        hows = Counter(outcome.how for outcome in mine if outcome.problem is None)
        held = "; ".join(f"{count} {how}" for how, count in hows.most_common())
        lines.append(f"| {kind} | {len(mine)} | {hows.total()} | {len(mine) - hows.total()} | {held} |")
    return "\n".join(lines)


def main() -> int:
    """Read the command line and try; returns 1 where an attempt failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="0", help="or several, with commas between (0)")
    parser.add_argument("--attempts", type=int, default=500, help="of each seed (500)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas between (all)")
    parser.add_argument("--recipes", default=",".join(references.RECIPES), help="with commas between (all)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="side by side (cores)")
    parser.add_argument("--only", type=int, help="this attempt alone")
    parser.add_argument("--folder", type=Path, help="to work in; failures stay there (a new one in the temporary)")
    options = parser.parse_args()
    if unknown := {*options.kinds.split(",")} - {*KINDS}:
        parser.error(f"no kind {', '.join(sorted(unknown))}")
    os.environ |= ENVIRONMENT
    preload()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="torture-"))).absolute()
    begin = time.monotonic()
    place = folder / "references"
    undisturbed = {name: references.build(name, place / name) for name in options.recipes.split(",")}
    print(f"undisturbed runs: {time.monotonic() - begin:.0f} s", flush=True)
    failed = sum(run_seed(int(seed), options, folder, undisturbed) for seed in options.seed.split(","))
    if not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
