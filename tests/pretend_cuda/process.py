"""A process with the pretend device: runs scenarios by name as rank 1 of its node and prints what each returns as JSON.

`python -m pretend_cuda.process NAME ...` from tests/, where NAME is a function of scenarios.py or FILE.FUNCTION. The
order of imports matters, so it is not imported by tests.
"""

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def _scenario(name: str) -> Callable[[], Any]:
    file, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"pretend_cuda.{file or 'scenarios'}"), function)


def main(names: list[str]) -> None:
    """One line of JSON for each: {"name", "result"} or {"name", "error": traceback}."""
    for name in names:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                answer = {"name": name, "result": _scenario(name)()}
        except Exception:
            answer = {"name": name, "error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
