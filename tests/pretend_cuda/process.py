"""A process with the pretend device: runs scenarios by name as rank 1 of its node and prints what each returns as JSON.

`python -m pretend_cuda.process NAME ...` from tests/, where NAME is a function of scenarios.py or FILE.FUNCTION. It
answers lines of names on stdin where it is given none: each from a fork of itself, as if nothing had run before, with
an empty line at the end. The order of imports matters, so it is not imported by tests.
"""

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

# Rank 1 of its node, and rank 0 of one: work that names no device would go to the other one.
os.environ |= {"LOCAL_RANK": "1", "DS_ACCELERATOR": "cpu"}
# transformers reads weights in threads, and the pretence holds in this one.
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "eval"), str(TESTS / "trainers")]

from pretend_cuda import guard  # noqa: E402

guard.load()

from pretend_cuda import device  # noqa: E402

device.install()

from pretend_cuda import engine  # noqa: E402

engine.install()


def answer(names: list[str]) -> None:
    """One line of JSON for each: {"name", "result"} or {"name", "error": traceback}."""
    for name in names:
        file, _, function = name.rpartition(".")
        try:
            with contextlib.redirect_stdout(sys.stderr):
                scenario = getattr(importlib.import_module(f"pretend_cuda.{file or 'scenarios'}"), function)
                said = {"name": name, "result": scenario()}
        except Exception:
            said = {"name": name, "error": traceback.format_exc()}
        print(json.dumps(said), flush=True)


def serve() -> None:
    """Answer lines of names until there are no more."""
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                answer(line.split())
            finally:
                sys.stdout.flush()
                os._exit(0)
        os.waitpid(pid, 0)
        print(flush=True)


if __name__ == "__main__":
    answer(sys.argv[1:]) if sys.argv[1:] else serve()
