#!/usr/bin/env python
"""Changes the code at random, one place at a time, and asks the nearest tests to notice.

    tests/tools/mutants.py 300            # the first 300 of seed 0, and what survived
    tests/tools/mutants.py 20 --seed 3

A mutant is one change of one expression or statement: a comparison, an operator, a constant, a keyword argument or a
call that is left out. Mutants are drawn from all product files with one seed; more of them begin with the same ones.
The nearest tests of a file are the one at the mirrored path and those that import it. They run in a copy until the
first one fails. A survivor is to be read: tests farther away may notice it, or it changes nothing that a test should.
`mutate.py` has the faults that somebody thought of.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mutate

ROOT = mutate.ROOT
PRODUCT = ("core", "data", "models", "eval", "trainers", "recipes")
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
    paths = sorted(path for folder in PRODUCT for path in (root / folder).rglob("*.py"))
    every = [one for path in paths for one in mutants_of(str(path.relative_to(root)), path.read_text())]
    random.Random(seed).shuffle(every)
    return every[:count]


def nearest_tests(root: Path, file: str) -> tuple[str, ...]:
    """At most `NEAREST` test files: the mirrored path, then those that import the file, its namesakes first."""
    path = Path(file)
    mirrored = root / "tests" / path.parent / f"test_{path.stem}.py"
    module = ".".join(["draftsmith", *path.with_suffix("").parts])
    package = module.rpartition(".")[0]
    ways = (f"from {module} import", f"from {package} import {path.stem}\n")
    users = [test for test in sorted((root / "tests").rglob("test_*.py"))
             if "pretend_cuda" not in test.parts and any(way in test.read_text() for way in ways)]  # fmt: skip
    users.sort(key=lambda test: path.stem not in test.stem)
    near = [mirrored, *users] if mirrored.is_file() else users
    return tuple(str(test.relative_to(root)) for test in dict.fromkeys(near))[:NEAREST]


def verdict(copied: Path, mutant: Mutant, tests: tuple[str, ...]) -> str:
    """killed, survived, or why there is no answer."""
    if not tests:
        return "no test is near"
    path = copied / mutant.file
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.stop :])
    try:
        code, _ = mutate.run_tests(copied, tests, LIMIT_S)
    finally:
        path.write_bytes(source)
    if code == 0:
        return "survived"
    return "killed" if mutate.run_tests(copied, tests, LIMIT_S)[0] == 0 else "its tests fail without it"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each mutant, and how many were killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    # A file that is changed and changed back within a second must not be read from what was compiled of it.
    os.environ.update(mutate.ENVIRONMENT | {"PYTHONDONTWRITEBYTECODE": "1"})
    verdicts = []
    with mutate.copied(ROOT) as copied:
        for mutant in drawn(ROOT, options.seed, options.count):
            tests = nearest_tests(ROOT, mutant.file)
            verdicts.append(verdict(copied, mutant, tests))
            print(f"{verdicts[-1]}  {mutant.name}  ({' '.join(tests)})", flush=True)
    print(f"{verdicts.count('killed')} killed, {verdicts.count('survived')} survived, of {len(verdicts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
