"""Scenarios of the pretend device, asked of one process for all tests: it takes five seconds to start."""

import atexit
import functools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from . import guard

TESTS = Path(__file__).resolve().parents[1]


@functools.cache
def _started() -> SimpleNamespace:
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  as long as the process
    process = subprocess.Popen(
        [sys.executable, "-m", "pretend_cuda.process"], cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=errors, text=True,
    )  # fmt: skip
    atexit.register(process.kill)
    return SimpleNamespace(process=process, errors=errors)


def results_of(*names: str) -> dict:
    """What scenarios return, all from one fork of the process. Fails with the scenario's own traceback, and skips the
    test where nothing can compile the device.
    """
    if guard.compiled() is None and shutil.which(guard.compiler()) is None:
        pytest.skip(f"no C++ compiler ({guard.compiler()}): Debian has it in g++")
    process, errors = _started().process, _started().errors
    begin = errors.seek(0, 2)
    process.stdin.write(" ".join(names) + "\n")
    process.stdin.flush()
    lines = []
    while (line := process.stdout.readline()).strip():  # an empty line ends the answer, and none the process
        lines.append(json.loads(line))
    assert len(lines) == len(names), (errors.seek(begin), errors.read()[-4000:])
    for line in lines:
        assert "error" not in line, f"{line['name']}:\n{line['error']}"
    return {line["name"]: line["result"] for line in lines}
