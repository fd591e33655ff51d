#!/usr/bin/env python
"""Changes the code at random, one place at a time, and asks the nearest tests to notice.

    tests/tools/mutants.py run 300 --into runs/mutants.jsonl    # the first 300 of seed 0; the same command continues
    tests/tools/mutants.py list runs/mutants.jsonl              # what survived; exit code 1 below 90% killed
    tests/tools/mutants.py recheck runs/mutants.jsonl           # what survived once more, in today's code

A mutant is one change of one expression or statement: a comparison, an operator, a constant, a keyword argument or a
call that is left out. Mutants are drawn from all product files with one seed; more of them begin with the same ones.
The nearest tests of a file are the one at the mirrored path, those that have its name in theirs, and those that import
it. They run in a copy until the first one fails, and that one must pass without the change. `mutate.py` has the
faults that somebody thought of. Each survivor here gets a test, or a line in `tests/mutants.yaml` that names a farther
test that notices it (`recheck` runs that one), or says why no test should; those count neither way.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import json
import os
import random
import re
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mutate
import yaml

ROOT = mutate.ROOT
TABLE = ROOT / "tests" / "mutants.yaml"
PRODUCT = ("core", "data", "models", "eval", "trainers", "recipes")
WANTED = 0.9  # share of those that tests could notice
NEAREST = 3  # test files of a mutant
LIMIT_S = 300  # of the tests of one mutant
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
# What the words of an error are made of, and what only people and type checkers read.
_PASSED_OVER = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
_NAMED = (ast.FunctionDef, ast.ClassDef)
_WORDS = {"hint", "where", "problem", "description"}


@dataclass(frozen=True)
class Mutant:
    """`start`, `stop`: bytes of the file that `new` takes the place of."""

    file: str
    line: int
    start: int
    stop: int
    old: str
    new: str

    @property
    def name(self) -> str:
        """What identifies it as long as its file stays as it is."""
        return f"{self.file}:{self.line}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Every change of a file, in its order."""
    source = text.encode()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _visited(ast.parse(text)):
        assert node.end_lineno is not None and node.end_col_offset is not None, "of what was parsed"
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[node.end_lineno - 1] + node.end_col_offset
        for new in _changes(node):
            found.append(Mutant(file, node.lineno, start, stop, source[start:stop].decode(), new))
    return found


def _visited(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Nodes that are part of what the code does, parents first."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_words = isinstance(child, ast.keyword) and child.arg in _WORDS
            if isinstance(child, ast.AST) and not is_words and not isinstance(child, _PASSED_OVER):
                if isinstance(child, ast.expr | ast.stmt):
                    yield child
                yield from _visited(child)


def _changes(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield _unparsed(node, ops=[SWAPS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        yield _unparsed(node, op=SWAPS[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Call):
        for kept in node.keywords:
            if kept.arg is not None and kept.arg not in _WORDS:
                yield _unparsed(node, keywords=[one for one in node.keywords if one is not kept])
    elif isinstance(node, ast.IfExp):
        yield _unparsed(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "pass"
    elif isinstance(node, ast.Break | ast.Continue):
        yield "continue" if isinstance(node, ast.Break) else "break"


def _unparsed(node: ast.AST, **changes: object) -> str:
    other = copy.copy(node)
    for name, value in changes.items():
        setattr(other, name, value)
    return f"({ast.unparse(other)})"


def drawn(root: Path, seed: int, count: int) -> list[Mutant]:
    """The first `count` of all mutants in a random order."""
    every = [one for path, text in _texts(root, *PRODUCT).items() for one in mutants_of(str(path), text)]
    random.Random(seed).shuffle(every)
    return every[:count]


def nearest_tests(root: Path, file: str, *, is_of_user: bool = False) -> tuple[str, ...]:
    """At most `NEAREST` test files: mirrored path, then name, then imports; of equals those that name more of what the
    file defines. Where none has its path or name, also the files that do, and the tests of the modules that import it.
    """
    path = Path(file)
    stem = path.parent.name if path.stem == "__init__" else path.stem
    module, mirrored = ".".join(["draftsmith", *path.with_suffix("").parts]), Path("tests") / path.parent
    defined = [node.name for node in ast.parse((root / file).read_text()).body if isinstance(node, _NAMED)]
    names = re.compile(rf"\b(?:{'|'.join(map(re.escape, defined)) or '(?!)'})\b")
    package = re.escape(module.rpartition(".")[0])
    beside = re.compile(rf"^from {package} import (\([^)]*|.*)\b({'|'.join([path.stem, *defined])})\b", re.M)
    ranked = []
    for test, text in _texts(root, "tests").items():
        if not test.name.startswith("test_") or "pretend_cuda" in test.parts:  # those take minutes each
            continue
        is_imported = f"from {module} import" in text or beside.search(text) is not None
        is_named = test.parts[1] == path.parts[0] and stem in test.stem.removeprefix("test_").split("_")
        close = [test == mirrored / f"test_{stem}.py", is_named, is_imported]
        if any(close) or names.search(text):
            ranked.append(([not one for one in close], -len(names.findall(text)), str(test)))
    near = sorted(ranked)
    closest = [test for far, _, test in near if not all(far)]
    if all(far[0] and far[1] for far, *_ in near):
        closest = [test for *_, test in near]
        users = [user for user, text in _texts(root, *PRODUCT).items() if f".{path.stem} import" in text]
        closest += [test for user in users if not is_of_user
                    for test in nearest_tests(root, str(user), is_of_user=True)[:1]]  # fmt: skip
    return tuple(dict.fromkeys(closest))[:NEAREST]


@functools.cache
def _texts(root: Path, *folders: str) -> dict[Path, str]:
    """Python files and what they hold."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    return {path.relative_to(root): path.read_text() for path in paths}


def run(root: Path, mutants: Sequence[Mutant], into: Path) -> None:
    """A line of `into` for each mutant that has none."""
    into.parent.mkdir(parents=True, exist_ok=True)
    done = {line["name"] for line in read(into)}
    judged: dict[tuple[str, ...], bool] = {}  # whether they pass without a change
    with mutate.copied(root) as copied, open(into, "a") as file:
        for number, mutant in enumerate(mutants, 1):
            if mutant.name in done:
                continue
            line = {"name": mutant.name, **_tried(root, copied, mutant, judged), "mutant": asdict(mutant)}
            file.write(json.dumps(line) + "\n")
            file.flush()
            _say(f"{number}/{len(mutants)}", line)


def recheck(root: Path, into: Path, farther: Mapping[str, str], excused: Container[str]) -> None:
    """Tries the lines of `into` that are not killed once more, but for those `excused`; their names stay.

    Args:
        farther: name -> the test file that is asked in place of the nearest.
    """
    lines = read(into)
    judged: dict[tuple[str, ...], bool] = {}
    with mutate.copied(root) as copied:
        for number, line in enumerate(lines, 1):
            if line["verdict"] == "killed" or line["name"] in excused:
                continue
            before = Mutant(**line["mutant"])
            path = root / before.file
            same = [one for one in mutants_of(before.file, path.read_text() if path.is_file() else "")
                    if (one.old, one.new) == (before.old, before.new)]  # fmt: skip
            if same:  # of equals the one that is nearest
                mutant = min(same, key=lambda one: abs(one.line - before.line))
                tests = (farther[line["name"]],) if line["name"] in farther else None
                line |= _tried(root, copied, mutant, judged, tests) | {"mutant": asdict(mutant)}
            else:
                line |= {"verdict": "no place", "by": "what it changes is no longer there"}
            into.write_text("".join(json.dumps(one) + "\n" for one in lines))
            _say(f"{number}/{len(lines)}", line)


def _say(number: str, line: dict[str, Any]) -> None:
    print(f"{number} {line['verdict']:<8} {line['seconds']:4.0f} s  {line['name'][:150]}", flush=True)


def _tried(
    root: Path, copied: Path, mutant: Mutant, judged: dict[tuple[str, ...], bool], tests: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """What a line says of the tests; a verdict that starts with "no " counts neither way."""
    start = time.monotonic()
    tests = nearest_tests(root, mutant.file) if tests is None else tests
    verdict, by = _verdict(copied, mutant, tests, judged) if tests else ("survived", "no test is near")
    return {"verdict": verdict, "by": by, "tests": tests, "seconds": round(time.monotonic() - start, 1)}


def _verdict(
    copied: Path, mutant: Mutant, tests: tuple[str, ...], judged: dict[tuple[str, ...], bool]
) -> tuple[str, str]:
    path = copied / mutant.file
    left_out = [f"--deselect={one[0]}" for one, passes in judged.items() if not passes and len(one) == 1]
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.stop :])
    try:
        code, text = mutate.run_tests(copied, (*tests, *left_out), LIMIT_S)
    finally:
        path.write_bytes(source)
    if code == 0:
        return "survived", ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", text, re.M)[:1]
    judges = tuple(failed) or tests
    if judges not in judged:
        judged[judges] = mutate.run_tests(copied, judges, LIMIT_S)[0] == 0
    if not judged[judges] and failed:  # the others may know
        return _verdict(copied, mutant, tests, judged)
    if not judged[judges]:
        return "no answer", "the tests fail, or take too long, without a change"
    return "killed", failed[0] if failed else "time" if code < 0 else f"pytest ended with {code}"


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a run; none where it has not begun."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where `list` finds fewer killed than `WANTED`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run")
    running.add_argument("count", type=int)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--into", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    for verb in ("list", "recheck"):
        verbs.add_parser(verb).add_argument("into", type=Path)
    options = parser.parse_args(arguments)
    table = yaml.safe_load(TABLE.read_text())
    farther, reasons = table["farther"], table["equivalent"]
    # A file that is changed and changed back within a second must not be read from what was compiled of it.
    os.environ.update(mutate.ENVIRONMENT | {"PYTHONDONTWRITEBYTECODE": "1"})
    if options.verb == "run":
        run(ROOT, drawn(ROOT, options.seed, options.count), options.into)
    elif options.verb == "recheck":
        recheck(ROOT, options.into, farther, reasons)
    lines = read(options.into)
    killed = sum(line["verdict"] == "killed" for line in lines)
    rest = {line["name"]: line for line in lines if line["verdict"] != "killed"}
    excused = [name for name in rest if name in reasons]
    survived = [one for name, one in rest.items() if name not in reasons and one["verdict"] == "survived"]
    for name in excused:
        print(f"{name}  (no test should notice: {reasons[name]})")
    for line in survived:
        print(f"{line['name']}  ({line['by'] or ' '.join(line['tests'])})")
    tried = killed + len(survived)
    print(f"{killed} of {tried} killed; {len(excused)} that no test should notice, "
          f"{len(lines) - tried - len(excused)} without an answer")  # fmt: skip
    return int(options.verb == "list" and killed < WANTED * tried)


if __name__ == "__main__":
    sys.exit(main())
