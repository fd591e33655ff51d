"""Runs a program in a serving engine's own Python, beside this one, and reads what it wrote.

A program is a file that imports nothing of ours. It is given one folder, which holds `asked.json`, and writes
`answers.jsonl` there, one JSON object a line. What it prints goes to `log.txt`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core.errors import UserError

PYTHON = "DRAFTSMITH_VLLM_PYTHON"
VLLM = Path(__file__).with_name("vllm_program.py")
_SET_UP = f"scripts/test_engines makes an environment with vLLM on a CPU; name its interpreter: --python or {PYTHON}"
_LINES = 12  # of a log, in an error


def find_python(asked: str | None = None, engine: str = "vllm") -> str:
    """The interpreter with an engine: `asked`, else (of vLLM) the environment variable DRAFTSMITH_VLLM_PYTHON, else
    this one.

    Raises:
        UserError: it does not exist, or the engine is not installed there.
    """
    python = asked or (os.environ.get(PYTHON) if engine == "vllm" else None) or sys.executable
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({engine!r}) is None)"
    try:
        done = subprocess.run([python, "-c", look], capture_output=True, check=False)
    except OSError as error:
        raise UserError(f"no interpreter: {error}", where=python, hint=_SET_UP) from None
    if done.returncode != 0:
        name = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
        hint = _SET_UP if engine == "vllm" else "name the interpreter of its environment: engine.python"
        raise UserError(f"{name} is not installed in this Python", where=python, hint=hint)
    return python


def version_of(package: str, python: str) -> str:
    """The version of an importable package in another interpreter's environment (vLLM's has several names there)."""
    look = f"import importlib.metadata as m; print(m.version(m.packages_distributions()[{package!r}][0]))"
    done = subprocess.run([python, "-I", "-c", look], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def run_program(program: Path, folder: Path, asked: Mapping[str, Any], *, python: str) -> list[dict[str, Any]]:
    """Run `program` and return the objects of its `answers.jsonl`.

    Args:
        folder: exists; requests, answers and the log are kept in it.
        asked: what the program is to do; written as `asked.json`.

    Raises:
        UserError: it stopped, or wrote something that is no JSON.
    """
    (folder / "asked.json").write_text(json.dumps(asked))
    log, answers = folder / "log.txt", folder / "answers.jsonl"
    environment = os.environ | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    with log.open("w") as output:
        # -I: nothing of ours, by PYTHONPATH or beside the program, is found before the engine's own modules.
        done = subprocess.run([python, "-I", "-u", str(program.resolve()), str(folder.resolve())], stdout=output,
                              stderr=subprocess.STDOUT, env=environment, cwd=folder, check=False)  # fmt: skip
    if done.returncode != 0:
        raise UserError(f"the engine stopped with exit code {done.returncode}; its last lines:\n{last_lines(log)}",
                        where=str(log), hint="fix what it says, or ask the engine's makers")  # fmt: skip
    if not answers.is_file():
        raise UserError("the engine ended and wrote no answers", where=str(log), hint="read its log")
    return list(_read(answers))


def last_lines(log: Path) -> str:
    """What an engine's log says of its end: up to the last error, where it names one, and not what came of it."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [number for number, line in enumerate(lines) if re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)]
    return "\n".join(f"    {line}" for line in lines[: errors[-1] + 1 if errors else None][-_LINES:])


def _read(path: Path) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise UserError("the engine wrote a line that is no JSON object", where=f"{path}, line {number}",
                            hint="the disk may be full; run it again")  # fmt: skip
        yield value
