"""The shape of the repository: packages, import direction, core and extras, rooms, and one door per heavy dependency.

Today's exceptions stand in `layout_exceptions.yaml`, which may only shrink: a test fails where one is no longer needed.
"""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
house = sys.modules["house"]  # conftest.py has loaded it
EXCEPTIONS = yaml.safe_load(Path(__file__).with_name("layout_exceptions.yaml").read_text())
LAYERS = {"core": 0, "data": 1, "models": 1, "eval": 2, "trainers": 3, "recipes": 4}
DOORS = {
    "deepspeed": {"trainers/train/engine.py"},
    "omegaconf": {"core/interpolation.py"},
    "wandb": {"core/tracking.py"},
    "matplotlib": {"eval/figures.py"},
    "webdataset": {"data/shapes/captioned.py"},
    "peft": {"models/training.py"},
    "pandas": {"eval/measured_rows.py"},
    "jinja2": {"core/markdown.py"},
    "av": {"data/pictures/videos.py"},
    "datasets": {"data/suites/suite_hub.py", "data/records/table_records.py"},
    "torchmetrics": {"eval/text_quality.py"},
    "nltk": {"eval/text_quality.py"},
}


@functools.cache
def files_of_ours() -> dict[str, ast.Module]:
    """Not at the import, which each worker of the tests does."""
    return house.trees()


@functools.cache
def imports_of_ours() -> list:
    return house.imports(files_of_ours())


def sources() -> list[Path]:
    return [p for top in LAYERS for p in (ROOT / top).rglob("*.py")] + [ROOT / "__init__.py"]


def imports(path: Path) -> list[tuple[int, str]]:
    """(level, module) of each import in a file."""
    result = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            result += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            result.append((node.level, node.module or ""))
    return result


def package_of(path: Path, level: int, module: str) -> str | None:
    """The top-level folder of ours that a relative import reaches."""
    folder = path.parent
    for _ in range(level - 1):
        folder = folder.parent
    parts = (*folder.relative_to(ROOT).parts, *module.split("."))
    return parts[0] if parts and parts[0] in LAYERS else None


def test_constraints_are_sorted():
    names = [line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()[1:]]
    assert names == sorted(names)


def test_package_list_equals_the_tree():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {p.parent.relative_to(ROOT) for p in sources() if p.name == "__init__.py"}
    assert listed == {".".join(("draftsmith", *f.parts)) for f in folders}


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_flow_one_way(path):
    here = path.relative_to(ROOT).parts[0]
    for level, module in imports(path):
        if level == 0:
            top = module.split(".")[0]
            assert top not in LAYERS, f"bare import of {module}: works by accident from the root only"
            assert top != "draftsmith", f"inside the package imports are relative: {module}"
            allowed = DOORS.get(top)
            if allowed is not None:
                assert str(path.relative_to(ROOT)) in allowed, f"{top} enters through {allowed}"
        elif here in LAYERS:
            there = package_of(path, level, module)
            if there is not None and there != here:
                assert LAYERS[there] < LAYERS[here], f"{here} may not import {there}"


# Files that name core and extras: the unions that recipes read, the commands' table, and what chooses a family.
UNIONS = {
    "data/families/table.py",
    "models/drafters/__init__.py",
    "models/targets/table.py",
    "recipes/commands/cli.py",
    "recipes/config/schema.py",
    "trainers/evaluate/probe_settings.py",
    "trainers/evaluate/studies.py",
    "trainers/readers.py",
    "trainers/serve/engines.py",
    "trainers/train/drafter.py",
}

# Rooms of a folder from the ground up: a room may import those below it, and of its own floor one way.
FLOORS = {
    "trainers": 0,
    "trainers/run": 1,
    **dict.fromkeys((f"trainers/{n}" for n in ("train", "evaluate", "publish", "serve", "estimate")), 2),
    "trainers/stages": 3,
    "data/pictures": 0,
    "data/families": 1,
    "data/records": 2,
    **dict.fromkeys(("data/shards", "data/suites"), 3),
    "data": 4,
    **dict.fromkeys((f"data/{n}" for n in ("captioned", "shapes", "states")), 5),
    "models": 0,
    "models/fast": 0,
    "models/decoding": 1,
    "models/targets": 2,
    **dict.fromkeys((f"models/targets/{n}" for n in house.TARGETS), 3),
    "models/targets above families": 4,
    "models/drafters": 5,
    "models/formats": 6,
}  # fmt: skip


def names_of_modules(files: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """(file, text) of each string that names a module of ours, and of each name made of `__package__` or `__name__`."""
    for path, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = node.value.removeprefix("draftsmith.").split(".")
                stem = "/".join(words)
                if len(words) > 1 and (f"{stem}.py" in files or f"{stem}/__init__.py" in files):
                    yield path, node.value
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("__package__", "__name__"):
                yield path, ast.unparse(node)


_TESTS = ("search", "match", "fullmatch", "startswith", "endswith")


def decisions_on_errors(files: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """(file, code) of each comparison or search in the text of an exception or a finding, or in a name given to one."""
    for path, tree in files.items():
        errors = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
        errors |= {
            node.arg
            for node in ast.walk(tree)
            if isinstance(node, ast.arg) and re.search(r"Error\b|Exception\b", ast.unparse(node.annotation or node))
        }
        errors |= {
            node.target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.comprehension) and ast.unparse(node.iter).startswith("causes(")
            if isinstance(node.target, ast.Name)
        }
        said = rf"(str|first_line)\(({'|'.join(errors) or '-'})\)|\b\w+\.(problem|args)\b|\bfinding\.what\b"
        named = {
            part.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and re.match(said, ast.unparse(node.value))
            for part in node.targets
            if isinstance(part, ast.Name)
        }
        text = re.compile("|".join([said, *(rf"\b{name}\b" for name in named)]))
        for node in ast.walk(tree):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TESTS
            compared = isinstance(node, ast.Compare) and isinstance(
                node.ops[0], ast.In | ast.NotIn | ast.Eq | ast.NotEq
            )
            if (called or compared) and text.search(ast.unparse(node)):
                yield path, ast.unparse(node)


def decisions_on_names(files: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """(file, code) of each comparison with the name of a class or of its module."""
    name = re.compile(r"\w\)?\.__(name|module|qualname)__")
    for path, tree in files.items():
        for node in ast.walk(tree):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TESTS
            asked = isinstance(node, ast.Compare | ast.SetComp) or called
            if (
                asked
                and name.search(ast.unparse(node))
                and not any(isinstance(n, ast.JoinedStr) for n in ast.walk(node))
            ):
                yield path, ast.unparse(node)


def holds(found, name: str):
    """Both ways: nothing new, and no exception that the code does without."""
    table = EXCEPTIONS[name]
    found, excepted = set(found), {(key, value) for key, values in table.items() for value in values}
    assert not found - excepted, "new"
    assert not excepted - found, "no longer needed: take it off the list"


def test_each_extra_exists():
    parts = [part for group in house.EXTRAS.values() for part in group]
    assert not [part for part in parts if not any(path.startswith(part) for path in files_of_ours())]


def test_core_never_imports_extras():
    reached = {(i.path, i.target) for i in imports_of_ours() if not house.is_extra(i.path) and house.is_extra(i.target)}
    assert {path for path, _ in reached} >= {path for path in UNIONS if path in files_of_ours()}, (
        "a union of core alone"
    )
    holds([pair for pair in reached if pair[0] not in UNIONS], "core_imports_extras")


def test_tests_of_the_core_need_no_extra():
    """Nor do the files beside them that they import."""
    apart = house.extra_tests()
    extras = tuple(f"draftsmith.{part.removesuffix('.py').rstrip('/').replace('/', '.')}"
                   for group in ("studies", "serving", "families") for part in house.EXTRAS[group])  # fmt: skip
    files = {path.relative_to(ROOT / "tests"): path for path in (ROOT / "tests").rglob("*.py")}
    beside = {path.stem: path for path in files.values()}
    core = [path for place, path in files.items() if not any(str(part) in apart for part in (place, *place.parents))]
    queue = [path for path in core if path.name.startswith("test_")]
    reached, core_seen = set(), set()
    while queue:
        path = queue.pop()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                reached |= {(path.name, name) for name in names if name.startswith(extras)}
                if (helper := beside.get(node.module)) and helper not in core_seen:
                    core_seen.add(helper)
                    queue.append(helper)
    assert not reached


def test_files_are_short():
    assert not [path for path in files_of_ours() if len((ROOT / path).read_text().splitlines()) > 400]


def test_rooms_are_layered():
    unknown = {
        r for r in map(house.room, files_of_ours()) if r.startswith(("data/", "trainers/", "models/"))
    } - FLOORS.keys()
    assert unknown <= {"trainers/serve/workers"}, "a room without a floor"
    upward = {
        (i.path, i.target)
        for i in imports_of_ours()
        if FLOORS.get(house.room(i.path), 99) < FLOORS.get(house.room(i.target), -1)
        and house.room(i.path).split("/")[0] == house.room(i.target).split("/")[0]
    }
    holds(upward, "upward")


def test_no_two_rooms_import_each_other():
    holds(house.two_way(imports_of_ours()), "two_way")


def test_no_circles_of_files():
    assert house.circles(imports_of_ours()) == EXCEPTIONS["circles"]


def test_no_import_of_ours_for_types_alone():
    """An arrow that only a type checker sees is an arrow."""
    holds({(i.path, i.target) for i in imports_of_ours() if i.for_types}, "for_types")


def test_no_string_names_a_module_of_ours():
    holds(names_of_modules(files_of_ours()), "modules_in_strings")


def test_no_decision_on_the_text_of_an_error():
    holds(decisions_on_errors(files_of_ours()), "texts_of_errors")


def test_no_comparison_with_the_name_of_a_class():
    holds(decisions_on_names(files_of_ours()), "names_of_classes")


def test_few_files_name_a_family():
    excepted = EXCEPTIONS["files_that_name"]
    assert excepted.keys() <= set(house.FAMILIES) and min(excepted.values()) > 2
    named = {family: len(house.naming(files_of_ours(), family)) for family in house.FAMILIES}
    assert not {family: n for family, n in named.items() if n > excepted.get(family, 2)}


def test_each_family_stands_in_the_tables():
    files = files_of_ours()
    reached = {i.target for i in imports_of_ours() if i.path in ("models/targets/table.py", "data/families/table.py")}
    wanted = {path for n in house.TARGETS for path in (f"models/targets/{n}/section.py", f"data/families/{n}.py")}
    assert wanted & files.keys() <= reached and wanted & files.keys()


def test_a_file_name_stands_once_or_is_listed():
    assert house.repeated_names(files_of_ours()) == EXCEPTIONS["repeated"]


def test_the_rules_see_what_they_forbid():
    """Each in a piece of code that breaks it."""
    tree = ast.parse("""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from .b import B
def f(error: ValueError, kind: type):
    if "full" in str(error) or kind.__name__ == "B":
        return "draftsmith.eval.b"
    return f"{kind.__name__}: {error}"
""")
    other = ast.parse("def g():\n    from ..eval import a")
    files = {"eval/a.py": tree, "eval/b.py": ast.parse("from . import a"), "models/c.py": other}
    found = house.imports(files)
    assert [(i.path, i.target, i.for_types) for i in found] == [
        ("eval/a.py", "eval/b.py", True), ("eval/b.py", "eval/a.py", False), ("models/c.py", "eval/a.py", False),
    ]  # fmt: skip
    assert house.circles(found) == [["eval/a.py", "eval/b.py"]] and house.two_way(found) == []
    named = ["core/a.py", "eval/a.py", "core/files.py", "eval/files.py", "models/qwen.py", "data/qwen.py", "core/b.py"]
    assert house.repeated_names([*named, "recipes/commands/b.py"]) == {"a.py": 2}
    assert list(names_of_modules(files)) == [("eval/a.py", "draftsmith.eval.b")]
    assert [code for _, code in decisions_on_errors(files)] == ["'full' in str(error)"]
    assert [code for _, code in decisions_on_names(files)] == ["kind.__name__ == 'B'"]


def test_arguments_that_docstrings_explain_exist():
    """Of functions, and of classes with a constructor or fields."""
    gone = []
    for path, tree in files_of_ours().items():
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
            explained = re.split(r"\n\n|\n(?=\S)", (text or "").partition("Args:\n")[2])[0]
            inits = [n for n in node.body if getattr(n, "name", "") == "__init__"] if text else []
            functions = inits if isinstance(node, ast.ClassDef) else [node]
            known = {a.arg for f in functions if text for a in ast.walk(f.args) if isinstance(a, ast.arg)}
            if text and isinstance(node, ast.ClassDef):
                known |= {
                    n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                }
            names = re.findall(r"^    (\w+): ", explained, re.M)
            gone += [f"{path}: {node.name}: {name}" for name in names if known and name not in known]
    assert gone == []
