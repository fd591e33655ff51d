#!/usr/bin/env python
"""Plants known faults, one at a time, and asks the tests to notice.

    tests/tools/mutate.py                        # all of tests/mutations.yaml; exit code 1 below 95% killed
    tests/tools/mutate.py loop clock --jobs 2    # those whose name holds one of these words, two at a time
    tests/tools/mutate.py --list                 # their names alone

Each fault is a piece of text and what takes its place. It is planted in a copy of the repository, never in place, and
the tests that are named with it run there until the first one fails: the fault is killed. Without any fault all of
these tests must pass. A text that does not stand in its file exactly once is stale, which is an error.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "mutations.yaml"
WANTED = 0.95  # share of the faults that must be killed
# A fault may make a loop endless, and one run may wait for another.
LIMIT_S = 600
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": ""}
# Every run is forked from a process that has imported what takes seconds, and nothing of ours.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "transformers", "deepspeed", "pytest"])
_LEFT_OUT = shutil.ignore_patterns(".git", "runs", "build", "*.egg-info", ".*_cache", ".venv*")


@dataclass(frozen=True)
class Fault:
    """One line of the table.

    Args:
        file: where `old` stands exactly once, relative to the repository.
        tests: what pytest is asked for.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """`by`: the test that failed, or what happened in place of a failure."""

    fault: Fault
    verdict: Literal["killed", "survived", "error"]
    by: str
    seconds: float


def read_table(path: Path) -> list[Fault]:
    """The faults of a YAML file: test files -> name -> [file, old text, new text]. Names are unique."""
    faults = [
        Fault(name, file, old, new, tuple(shlex.split(tests)))
        for tests, rows in yaml.safe_load(path.read_text()).items()
        for name, (file, old, new) in rows.items()
    ]
    names = [fault.name for fault in faults]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"{path}: two faults are called {sorted(twice)}"
    return faults


def stale(faults: Iterable[Fault], root: Path) -> list[str]:
    """What is wrong with the table: texts that are gone or stand more than once, and tests that are not there."""
    problems = []
    for fault in faults:
        count = (root / fault.file).read_text().count(fault.old) if (root / fault.file).is_file() else 0
        if count != 1:
            problems.append(f"{fault.name}: the old text stands {count} times in {fault.file}")
        if fault.old == fault.new:
            problems.append(f"{fault.name}: the new text is the old one")
        missing = [t for t in fault.tests if t.startswith("tests/") and not (root / t.split("::")[0]).exists()]
        problems += [f"{fault.name}: no test {test}" for test in missing]
    return problems


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of the repository that goes afterwards; compiled files come along and stay valid."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Path(folder) / "draftsmith"  # the repository is the package, so its folder has its name
        shutil.copytree(root, copy, ignore=_LEFT_OUT)
        yield copy


def planted(fault: Fault, root: Path) -> Outcome:
    """The tests of one fault, in a copy that has it."""
    start = time.monotonic()
    with copied(root) as copy:
        path = copy / fault.file
        path.write_text(path.read_text().replace(fault.old, fault.new))
        code, text = run_tests(copy, fault.tests)
    failed = [line.split()[1] for line in text.splitlines() if line.startswith("FAILED ")]
    errors = [line.split()[1] for line in text.splitlines() if line.startswith("ERROR ")]
    seconds = time.monotonic() - start
    # An error of a fixture is a failed test as well; one while tests are collected says that the fault is no fault of
    # wiring, or that the table names no test.
    if code == 1 and (failed or errors):
        return Outcome(fault, "killed", (failed or errors)[0], seconds)
    if code == 0:
        return Outcome(fault, "survived", "", seconds)
    return Outcome(fault, "error", f"pytest ended with {code}: {text[-600:]}", seconds)


def run_tests(copy: Path, tests: Sequence[str], limit_s: float = LIMIT_S) -> tuple[int, str]:
    """(exit code, output) of pytest in a copy, at most so long; a negative code is that of a run that was ended."""
    handle, name = tempfile.mkstemp(dir=copy.parent)
    os.close(handle)
    log = Path(name)
    process = FORKS.Process(target=_pytest, args=(copy, tests, log))
    process.start()
    process.join(limit_s)
    if process.exitcode is None and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    assert process.exitcode is not None
    return process.exitcode, log.read_text()


def _pytest(copy: Path, tests: Sequence[str], log: Path) -> None:
    """In a process of its own, whose `draftsmith` is the copy's."""
    os.setsid()  # what tests start ends with them
    written = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ.update(ENVIRONMENT | {"PYTHONPATH": str(copy.parent)})
    os.chdir(copy)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that nobody forked
    # `copy` as well, as `python -m pytest` has it: ranks that are started anew import `tests.trainers...`.
    known = [path for path in sys.path if path not in ("", str(ROOT), str(ROOT.parent))]
    sys.path[:] = [str(copy.parent), str(copy), *known]
    import pytest

    sys.exit(pytest.main(["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]))


def run_all(faults: Sequence[Fault], root: Path, jobs: int) -> Iterator[Outcome]:
    """Every fault's outcome in the table's order. Raises RuntimeError where tests fail without a fault."""
    os.environ.update(ENVIRONMENT)  # before the process that everything is forked from imports torch
    with copied(root) as copy, ThreadPoolExecutor(jobs) as pool:
        sound = [*dict.fromkeys(fault.tests for fault in faults)]
        for tests, (code, text) in zip(sound, pool.map(lambda tests: run_tests(copy, tests), sound), strict=True):
            if code:
                raise RuntimeError(f"without a fault {' '.join(tests)} ends with {code}:\n{text[-3000:]}")
        yield from pool.map(lambda fault: planted(fault, root), faults)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 below `WANTED`, 2 where the table is stale or a test fails without a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of names; none: all faults")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are tested at a time")
    parser.add_argument("--table", type=Path, default=TABLE, help="another table than tests/mutations.yaml")
    parser.add_argument("--list", action="store_true", help="print names and files, run nothing")
    options = parser.parse_args(arguments)
    faults = [
        f for f in read_table(options.table) if not options.words or any(word in f.name for word in options.words)
    ]
    if problems := stale(faults, ROOT) or ([] if faults else [f"no fault is called {options.words}"]):
        print("\n".join(problems), file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{fault.file}: {fault.name}" for fault in faults))
        return 0
    count: dict[str, int] = {"killed": 0, "survived": 0, "error": 0}
    try:
        for outcome in run_all(faults, ROOT, options.jobs):
            count[outcome.verdict] += 1
            by: Any = outcome.by or " ".join(outcome.fault.tests)
            print(f"{outcome.verdict:<8} {outcome.seconds:4.0f} s  {outcome.fault.name}: {by}", flush=True)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"{count['killed']} of {len(faults)} killed, {count['survived']} survived, {count['error']} without an answer"
    )
    return 0 if count["killed"] >= WANTED * len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
