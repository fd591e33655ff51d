"""Programs in another interpreter: what they write comes back, and what goes wrong there is said here."""

import sys

import pytest
from draftsmith.core.errors import UserError
from draftsmith.eval.engines.program import PYTHON, find_python, run_program


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
        ("print('no kernel for heads of 8')\nsys.exit(7)", "exit code 7(.|\n)*no kernel for heads of 8"),
        ("pass", "wrote no answers"),
        ("(folder / 'answers.jsonl').write_text('{\"n\": 1}\\n{\"n\"')", r"no JSON object(.|\n)*answers.jsonl, line 2"),
    ],
)
def test_what_goes_wrong_there_is_said_here(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        run_program(program(tmp_path, text), tmp_path, {}, python=sys.executable)


def test_an_interpreter_is_looked_at_before_anything_is_loaded(monkeypatch, tmp_path):
    with pytest.raises(UserError, match=r"no interpreter(.|\n)*nowhere/python(.|\n)*scripts/test_engines"):
        find_python(str(tmp_path / "nowhere" / "python"))
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without any installed package
    bare.chmod(0o755)
    monkeypatch.setenv(PYTHON, str(bare))
    with pytest.raises(UserError, match="vLLM is not installed in this Python"):
        find_python()
