"""Runs a program in a serving engine's own Python, beside this one, and reads what it wrote.

A program is a file that imports nothing of ours. It is given one folder, which holds `asked.json`, and writes
`answers.jsonl` there, one JSON object a line. What it prints goes to `log.txt`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ...core.errors import UserError, page
from ...core.files import SMALL_BYTES, read_end, read_json_lines
from ...core.json_types import JsonMapping, JsonObject
from ...models.formats.plugin import MODULE, PACKAGE, PATCHES

PYTHON = "DRAFTSMITH_VLLM_PYTHON"
VLLM = Path(__file__).with_name("vllm_program.py")
LLAMA = Path(__file__).with_name("llama_program.py")
_BESIDE = Path(__file__).with_name("ends_with_parent.py")
_OLDEST = (0, 32)  # what was tried; older ones hand out no hidden states of chosen layers
_LINES = 12  # of a log, in an error
# A line of vLLM's log that a worker or its core wrote: (Worker pid=7) ERROR 11-25 18:59:57 [executor.py:953] ...
_OF_A_PROCESS = re.compile(r"\(\w+ pid=\d+\) ERROR .*?\] ((?:\w+\.)*\w*(?:Error|Exception)\b.*)")
_SET_UP = f"make an environment with vLLM ({page('how-to/engines.md')}), and name its interpreter: {{}} or {PYTHON}"
TIMEOUT_S = 3600.0
_LOOK_S = 300  # for an interpreter on a slow disk
# Prints the version, or nothing where the package is missing. vLLM's package has several names.
_LOOK = (
    "import importlib.metadata as m, importlib.util as u, sys\n"
    "names = m.packages_distributions().get(sys.argv[1]) if u.find_spec(sys.argv[1]) else None\n"
    "print('\\n' + (m.version(names[0]) if names else ''))"
)


def find_python(named: str | None = None, *, key: str = "--python") -> str:
    """The interpreter with vLLM: `named`, else the environment variable DRAFTSMITH_VLLM_PYTHON, else this one. `key`:
    what names it, for errors. Raises `UserError`: it does not exist, or vLLM is not installed there, or is older than
    what was tried.
    """
    python = named or os.environ.get(PYTHON) or sys.executable
    if os.sep in python:  # programs run in folders of their own; links stay, which are how an environment is found
        python = os.path.abspath(python)
    version = version_of("vllm", python, key=key)
    if not version:
        raise UserError("vLLM is not installed in this Python", where=python, hint=_SET_UP.format(key))
    number = re.match(r"(\d+)\.(\d+)", version)
    # What is built from a checkout without its tags calls itself 0.1.dev.
    if number and "dev" not in version and (int(number[1]), int(number[2])) < _OLDEST:
        wanted = ".".join(map(str, _OLDEST))
        raise UserError(
            f"vLLM {version} is installed in this Python, and {wanted} is the oldest that works", where=python,
            hint=f'install "vllm>={wanted}" there, or name another Python: {key}',
        )  # fmt: skip
    return python


def check_plugin(python: str, *, patches: bool = False) -> None:
    """Raises `UserError` where our plugin for vLLM is not installed in an interpreter of `find_python`. `patches`: the
    plugin must patch vLLM for the export, and the user has to ask for it.
    """
    if not version_of(MODULE, python):
        raise UserError(f"{PACKAGE} is not installed in this Python, and the export names a class of it", where=python,
                        hint=f"{python} -m pip install ./serving/{PACKAGE} (in a checkout of draftsmith)")  # fmt: skip
    if patches and os.environ.get(PATCHES) != "1":
        raise UserError("the export needs patches of vLLM, and they are off", hint=f"switch them on: {PATCHES}=1")


def version_of(module: str, python: str, *, key: str = "--python") -> str:
    """The version of a module's package in an interpreter's environment; empty where there is none. `key`: what names
    the interpreter, for errors.
    """
    try:
        done = subprocess.run(
            [python, "-I", "-c", _LOOK, module], capture_output=True, text=True, check=False, timeout=_LOOK_S
        )
    except subprocess.TimeoutExpired:
        problem = f"the interpreter said nothing for {_LOOK_S} s"
        raise UserError(problem, where=python, hint=_SET_UP.format(key)) from None
    except OSError as error:
        raise UserError(f"no interpreter: {error.strerror}", where=python, hint=_SET_UP.format(key)) from None
    return done.stdout.rstrip("\n").rpartition("\n")[2].strip()


def start_program(
    python: str, program: Path, folder: Path, log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own; it is killed when this process ends, however it does. `folder`: its
    argument, and where it runs. `log`: gets what it prints.
    """
    with log.open("w", encoding="utf-8") as output:
        # -I: nothing of ours, by PYTHONPATH or beside the program, is found before the engine's own modules.
        return subprocess.Popen(
            [python, "-I", "-u", str(_BESIDE), str(program.resolve()), str(folder.resolve())],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=dict(environment), cwd=folder,
            start_new_session=True,
        )  # fmt: skip


def kill_program(process: subprocess.Popen[bytes]) -> None:
    """Kill a started program with all its own processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def run_program(
    program: Path, folder: Path, job: JsonMapping, *, python: str, timeout_s: float = TIMEOUT_S
) -> list[JsonObject]:
    """Run `program` and return the objects of its `answers.jsonl`; what they hold is the caller's to check. Raises
    `UserError`: it stopped, took too long, or wrote something that is no file of JSON objects.

    Args:
        folder: exists; requests, answers and the log are kept in it.
        job: what the program is to do; written as `asked.json`.
        timeout_s: after which it is taken for hung.
    """
    (folder / "asked.json").write_text(json.dumps(job))
    log, answers = folder / "log.txt", folder / "answers.jsonl"
    environment = os.environ | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    answers.unlink(missing_ok=True)  # of an earlier program
    process = start_program(python, program, folder, log, environment)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise UserError(f"the engine had not ended after {timeout_s:g} s; its last lines:\n{last_lines(log)}",
                        where=str(log), hint="it hangs, or needs longer: --timeout SECONDS") from None  # fmt: skip
    finally:
        kill_program(process)
    if code != 0:
        raise UserError(f"the engine {ended(code)}; its last lines:\n{last_lines(log)}", where=str(log),
                        hint=cure(code, log) or "fix what it says, or ask the engine's makers")  # fmt: skip
    if not answers.exists():
        raise UserError("the engine ended and wrote no answers", where=str(log), hint="read its log")
    hint = f"read its log ({log}); the disk may be full: run it again"
    return list(read_json_lines(answers, JsonObject, hint=hint, max_bytes=SMALL_BYTES, once=True))


def ended(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by signal {-code} ({signal.Signals(-code).name})"


def cure(code: int, log: Path, memory: str = "", disk: str = "") -> str | None:
    """What helps, where an engine's end says it; None: nothing known. `memory`: setting that makes it take less.
    `disk`: setting that names the folder of its files.
    """
    text = read_end(log)
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return "its disk is full: make room" + (f", or name another folder: {disk}" if disk else "")
    if code == -signal.SIGKILL or "OutOfMemoryError" in text or "out of memory" in text.lower():
        less = f": {memory}" if memory else ""
        return f"memory ran out, as far as it shows: give the machine more, or let the engine take less{less}"
    return None


def last_lines(log: Path) -> str:
    """What an engine's log says of its end: up to the last error with its indented lines, where it names one, and not
    what came of it. An error of one of its own processes, which the last one came of, stands first.
    """
    lines = read_end(log).splitlines()
    errors = [number for number, line in enumerate(lines) if re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)]
    end = errors[-1] + 1 if errors else len(lines)
    while errors and end < len(lines) and lines[end].startswith(" "):
        end += 1
    shown = lines[:end][-_LINES:]
    causes = [match[1] for line in lines[:end] if (match := _OF_A_PROCESS.match(line))]
    if causes and not any(causes[-1] in line for line in shown):
        shown = [causes[-1], *shown]
    return "\n".join(f"    {line}" for line in shown)
