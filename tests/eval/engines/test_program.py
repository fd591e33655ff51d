"""Programs in another interpreter: what they write comes back, and what goes wrong there is said here."""

import multiprocessing
import os
import signal
import sys
import time

import psutil
import pytest
from draftsmith.core.errors import UserError
from draftsmith.eval.engines.program import PYTHON, find_python, run_program, version_of
from fails import fails_with


def program(folder, text):
    path = folder / "program.py"
    path.write_text(f"import json, pathlib, sys\nfolder = pathlib.Path(sys.argv[1])\n{text}\n")
    return path


def test_answers_come_back_in_order(tmp_path):
    text = "asked = json.loads((folder / 'asked.json').read_text())\n" + (
        "(folder / 'answers.jsonl').write_text('\\n'.join(json.dumps({'n': n}) for n in asked['numbers']))"
    )
    assert run_program(program(tmp_path, text), tmp_path, {"numbers": [3, 1]}, python=sys.executable) == [
        {"n": 3}, {"n": 1},
    ]  # fmt: skip


def test_modules_beside_a_program_are_not_its_own(tmp_path):
    """A file of ours named like a library would stand before it on the path."""
    (tmp_path / "string.py").write_text("raise SystemExit('ours')")
    text = "import string\n(folder / 'answers.jsonl').write_text(json.dumps({'digits': string.digits}))"
    assert run_program(program(tmp_path, text), tmp_path, {}, python=sys.executable) == [{"digits": "0123456789"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "print('ValueError: 1 of them\\n  fp8 wants bf16\\nthat was all')\nsys.exit(1)",
            r"ValueError: 1 of them\n +fp8 wants bf16(?!\n +that was all)",
        ),
        (
            "print('(Worker pid=7) ERROR 11-25 18:59 [a.py:9] RuntimeError: no EAGLE3 interface')\n"
            "print('\\n'.join(f'line {n}' for n in range(40)))\nprint('RuntimeError: see above')\nsys.exit(1)",
            r"RuntimeError: no EAGLE3 interface(.|\n)*RuntimeError: see above",
        ),
        ("print('no kernel for heads of 8')\nsys.exit(7)", "exit code 7(.|\n)*no kernel for heads of 8"),
        ("import os; os.kill(os.getpid(), 9)", r"killed by signal 9 \(SIGKILL\)(.|\n)*memory ran out"),
        ("pathlib.Path('/dev/full').write_text('x')", r"exit code 1(.|\n)*No space left(.|\n)*its disk is full"),
        ("pass", "wrote no answers"),
        ("(folder / 'answers.jsonl').write_text('{\"n\": 1}\\n{\"n\"')", r"not valid JSON(.|\n)*answers.jsonl, line 2"),
        ("(folder / 'answers.jsonl').write_text('[1]')", r"expected a(.|\n)*answers.jsonl, line 1"),
        (
            "(folder / 'answers.jsonl').write_text('{\"n\": 1, \"n\": 2}')",
            r"'n' stands twice(.|\n)*, line 1",
        ),
        ("import os; os.mkfifo(folder / 'answers.jsonl')", r"not a regular file: a named pipe(.|\n)*answers.jsonl"),
        ("import os; os.truncate(os.open(folder / 'answers.jsonl', 65), 1 << 40)", r"larger than 67,108,864 bytes"),
        ("import os\n(folder / 'log.txt').unlink()\nos.mkfifo(folder / 'log.txt')\nsys.exit(3)", "exit code 3"),
    ],
)
def test_what_goes_wrong_there_is_said_here(tmp_path, text, words):
    fails_with(words, run_program, program(tmp_path, text), tmp_path, {}, python=sys.executable)


def test_an_interpreter_is_looked_at_before_anything_is_loaded(monkeypatch, tmp_path):
    for lost in (tmp_path / "nowhere" / "python", tmp_path):
        fails_with(rf"no interpreter(.|\n)*{lost}(.|\n)*engines.md", find_python, str(lost))
    with pytest.raises(UserError, match=r"vLLM is not installed(.|\n)*stages.x.engine.python"):
        find_python("/bin/true", key="stages.x.engine.python")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without any installed package
    bare.chmod(0o755)
    monkeypatch.setenv(PYTHON, str(bare))
    fails_with("vLLM is not installed in this Python", find_python)


@pytest.mark.parametrize(("version", "good"), [("0.31.9", False), ("0.32.0", True), ("1.0", True), ("0.1.dev9", True)])
def test_an_older_engine_is_refused_with_both_versions(monkeypatch, tmp_path, version, good):
    """A checkout that was built without its tags calls itself 0.1.dev, whatever it is."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho a warning of some library\necho\necho {version}\n")
    python.chmod(0o755)
    if good:
        assert find_python(str(python)) == str(python) and version_of("vllm", str(python)) == version
        return
    fails_with(r"vLLM 0.31.9 is installed(.|\n)*0.32 is the oldest(.|\n)*vllm>=0.32", find_python, str(python))


def test_a_program_that_hangs_is_ended_with_its_own_processes(tmp_path):
    text = "import subprocess, time\n(folder / 'own').write_text(str(subprocess.Popen(['sleep', '600']).pid))\n"
    text += "print('loading', flush=True)\ntime.sleep(600)"
    timeout_s, own = 0.5, tmp_path / "own"
    while not own.is_file():  # a busy machine takes long to start Python
        timeout_s *= 2
        with pytest.raises(UserError, match=r"had not ended after(.|\n)*--timeout"):
            run_program(program(tmp_path, text), tmp_path, {}, python=sys.executable, timeout_s=timeout_s)
    _wait_until_gone(int(own.read_text()))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_program_outlives_the_command(tmp_path, how):
    text = "import os, time\n(folder / 'own').write_text(str(os.getpid()))\ntime.sleep(600)"
    path, own = program(tmp_path, text), tmp_path / "own"
    command = multiprocessing.get_context("fork").Process(
        target=run_program, args=(path, tmp_path, {}), kwargs={"python": sys.executable}
    )
    command.start()
    while not (own.is_file() and own.read_text()):
        time.sleep(0.01)
    os.kill(command.pid, how)
    command.join(5)
    _wait_until_gone(int(own.read_text()))


def _wait_until_gone(pid):
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} lives on")
