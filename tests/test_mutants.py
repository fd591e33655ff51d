"""tests/tools/mutants.py: random changes of the code, and the tests that are near it."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = '''"""Says 3 < 4."""
def f(a: int = 1, *, b: bool | None = True) -> int | None:
    """Not 5 + 6."""
    if a < 2 and not b:
        raise ValueError(f"{a + 7}")
    g(a, key=None, hint="8")
    return a + 3 if é else 2.0
'''


@pytest.fixture(scope="module")
def mutants():
    sys.path.insert(0, str(ROOT / "tests" / "tools"))
    yield importlib.import_module("mutants")
    sys.path.remove(str(ROOT / "tests" / "tools"))


def test_every_change_of_a_file(mutants):
    found = mutants.mutants_of("core/f.py", CODE)
    assert sorted((one.line, one.old, one.new) for one in found) == sorted([
        (2, "1", "2"), (2, "True", "False"), (4, "a < 2", "(a <= 2)"), (4, "2", "3"), (4, "not b", "(b)"),
        (4, "a < 2 and not b", "(a < 2 or not b)"), (6, 'g(a, key=None, hint="8")', "(g(a, hint='8'))"),
        (6, 'g(a, key=None, hint="8")', "pass"), (7, "a + 3", "(a - 3)"), (7, "3", "4"), (7, "2.0", "3.0"),
        (7, "a + 3 if é else 2.0", "(a + 3 if not é else 2.0)"),
    ])  # fmt: skip
    for one in found:
        source = CODE.encode()
        compile(source[: one.start] + one.new.encode() + source[one.stop :], one.name, "exec")


def test_more_mutants_begin_with_the_same_ones_and_are_of_all_parts(mutants):
    many = mutants.drawn(ROOT, 0, 400)
    assert mutants.drawn(ROOT, 0, 30) == many[:30] != mutants.drawn(ROOT, 1, 30)
    assert {one.file.split("/")[0] for one in many} == set(mutants.PRODUCT)


def test_the_nearest_tests(mutants):
    assert mutants.nearest_tests(ROOT, "models/drafters/medusa.py")[0] == "tests/models/drafters/test_medusa.py"
    near = mutants.nearest_tests(ROOT, "eval/rules.py")
    assert 0 < len(near) <= mutants.NEAREST and all("eval.rules import" in (ROOT / one).read_text() for one in near)


def test_what_is_killed_what_survives_and_what_has_no_answer(mutants, tmp_path, monkeypatch, capsys):
    package = tmp_path / "draftsmith"
    package.mkdir()
    for name, text in {"a.py": "x = 1 < 2\n", "b.py": "y = 3\n", "c.py": "z = 4\n"}.items():
        (package / name).write_text(text)
    near = {"a.py": ("test_a",), "b.py": (), "c.py": ("broken",)}
    monkeypatch.setattr(mutants, "ROOT", package)
    monkeypatch.setattr(mutants, "nearest_tests", lambda root, file: near[file])
    every = [one for name in near for one in mutants.mutants_of(name, (package / name).read_text())]
    monkeypatch.setattr(mutants, "drawn", lambda root, seed, count: every[:count])
    monkeypatch.setattr(mutants.mutate, "run_tests", lambda copied, tests, limit_s: (
        int(tests == ("broken",) or "<=" in (copied / "a.py").read_text()), ""))  # fmt: skip
    assert mutants.main(["9"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "killed  a.py:1: 1 < 2 -> (1 <= 2)  (test_a)", "survived  a.py:1: 1 -> 2  (test_a)",
        "survived  a.py:1: 2 -> 3  (test_a)", "no test is near  b.py:1: 3 -> 4  ()",
        "its tests fail without it  c.py:1: 4 -> 5  (broken)", "1 killed, 2 survived, of 5",
    ]  # fmt: skip
