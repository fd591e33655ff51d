"""tests/tools/mutants.py: random changes of the code, and the tests that are near it."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import yaml

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
    assert len({one.file for one in many}) > 150


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("eval/summary.py", "tests/eval/test_summary.py"),
        ("models/drafters/medusa.py", "tests/models/drafters/test_medusa.py"),
        ("trainers/evaluate/resume_log.py", "tests/trainers/test_stopping.py"),
        ("eval/engines/engine_check.py", "tests/eval/engines/test_verify.py"),
        ("models/targets/language.py", "tests/models/drafters/test_medusa.py"),
    ],
)
def test_the_nearest_tests(mutants, file, wanted):
    near = mutants.nearest_tests(ROOT, file)
    assert wanted in near and len(near) <= mutants.NEAREST


def test_the_table_names_tests_that_are_there(mutants):
    table = yaml.safe_load(mutants.TABLE.read_text())
    assert all((ROOT / test).is_file() for test in table["farther"].values())
    assert not table["farther"].keys() & table["equivalent"].keys()


def test_a_run_goes_on_behind_its_last_line(mutants, tmp_path, monkeypatch, capsys):
    """What is killed, what survives and what no test is near; without a change tests must pass."""
    package = tmp_path / "draftsmith"
    (package / "tests").mkdir(parents=True)
    (package / "a.py").write_text("x = 1 < 2\n")
    (package / "b.py").write_text("y = 3\n")
    (package / "c.py").write_text("z\n")
    (package / "d.py").write_text("u\n")
    near = {"a.py": ("test_a",), "b.py": (), "c.py": ("broken",), "d.py": ("test_d",)}
    monkeypatch.setattr(mutants, "nearest_tests", lambda root, file: near[file])
    asked = []

    def run_tests(copied, tests, limit_s):
        asked.append((text := (copied / "a.py").read_text(), tests))
        if tests[0] == "broken":
            return -9, ""
        if tests[0].startswith("test_d"):  # one of these tests never passes in a copy
            return int("--deselect=test_d::old" not in tests), "FAILED test_d::old\n"
        return int("<=" in text or "2" not in text), "FAILED test_a.py::test[x - y] - assert [1] - 2\n"

    monkeypatch.setattr(mutants.mutate, "run_tests", run_tests)
    every = [*mutants.mutants_of("a.py", "x = 1 < 2\n"), *mutants.mutants_of("b.py", "y = 3\n")]
    every += [mutants.Mutant("c.py", 1, 0, 1, "z", "w"), mutants.Mutant("d.py", 1, 0, 1, "u", "v")]
    into = tmp_path / "runs" / "m.jsonl"
    mutants.run(package, every[:2], into)
    assert asked == [("x = (1 <= 2)\n", ("test_a",)), ("x = 1 < 2\n", ("test_a.py::test[x - y]",)),
                     ("x = 2 < 2\n", ("test_a",))]  # fmt: skip
    mutants.run(package, every, into)
    assert [tests[0] for _, tests in asked[-5:]] == ["broken", "broken", "test_d", "test_d::old", "test_d"]
    lines = [json.loads(line) for line in into.read_text().splitlines()]
    verdicts = {line["name"]: (line["verdict"], line["by"]) for line in lines}
    assert verdicts == {
        "a.py:1: 1 < 2 -> (1 <= 2)": ("killed", "test_a.py::test[x - y]"), "a.py:1: 1 -> 2": ("survived", ""),
        "a.py:1: 2 -> 3": ("killed", "test_a.py::test[x - y]"), "b.py:1: 3 -> 4": ("survived", "no test is near"),
        "c.py:1: z -> w": ("no answer", "the tests fail, or take too long, without a change"),
        "d.py:1: u -> v": ("survived", ""),
    }  # fmt: skip
    capsys.readouterr()
    table = tmp_path / "mutants.yaml"
    table.write_text(
        'equivalent: {"b.py:1: 3 -> 4": three is as good as four, "d.py:1: u -> v": a name}\n'
        'farther: {"a.py:1: 1 -> 2": test_far}\n'
    )
    monkeypatch.setattr(mutants, "TABLE", table)
    assert mutants.main(["list", str(into)]) == 1
    assert capsys.readouterr().out == (
        "b.py:1: 3 -> 4  (no test should notice: three is as good as four)\n"
        "d.py:1: u -> v  (no test should notice: a name)\na.py:1: 1 -> 2  (test_a)\n"
        "2 of 3 killed; 2 that no test should notice, 1 without an answer\n"
    )

    # What survived is found again where lines came before it, and the test that the table names notices it.
    monkeypatch.setattr(mutants, "ROOT", package)
    (package / "a.py").write_text("w = 9\n\n\nx = 1 < 2\n")
    monkeypatch.setattr(mutants.mutate, "run_tests", lambda copied, tests, limit_s: (
        int("2 < 2" in (copied / "a.py").read_text()), f"FAILED {tests[0]}::test\n"))  # fmt: skip
    assert mutants.main(["recheck", str(into)]) == 0 == mutants.main(["list", str(into)])
    changed = {name: (line["verdict"], line["by"], line["mutant"]["line"]) for line in mutants.read(into)
               if verdicts[name := line["name"]] != (line["verdict"], line["by"])}  # fmt: skip
    assert changed == {
        "a.py:1: 1 -> 2": ("killed", "test_far::test", 4),
        "c.py:1: z -> w": ("no place", "what it changes is no longer there", 1),
    }
