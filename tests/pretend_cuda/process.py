"""A process with the pretend device: runs scenarios by name as rank 1 of its node and prints what each returns as JSON.

`python -m pretend_cuda.process NAME ...` from tests/; the order of imports matters, so it is not imported by tests.
"""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path

# Rank 1 of its node, and rank 0 of one: work that names no device would go to the other one.
os.environ |= {"LOCAL_RANK": "1", "DS_ACCELERATOR": "cpu"}
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "eval"), str(TESTS / "trainers")]

from pretend_cuda import guard  # noqa: E402

guard.load()

from pretend_cuda import device  # noqa: E402

device.install()

from pretend_cuda import engine, scenarios  # noqa: E402

engine.install()


def main(names: list[str]) -> None:
    """One line of JSON for each: {"name", "result"} or {"name", "error": traceback}."""
    for name in names:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                answer = {"name": name, "result": getattr(scenarios, name)()}
        except Exception:
            answer = {"name": name, "error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
