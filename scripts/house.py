"""Numbers of the code: its budget, core and extras, rooms that import each other, circles of files, and names.

    python scripts/house.py    # the four totals of tests/budget.yaml, then a table

Core is what every user passes through. Extras are further target families, baseline drafters, other tools' formats,
engines' serving, the papers' studies and the synthetic dataset. A room is a folder; its files stand directly in it.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("core", "data", "models", "eval", "trainers", "recipes")

# Folders of the target families.
TARGETS = tuple(sorted(path.parent.name for path in (ROOT / "models" / "targets").glob("*/__init__.py")))
# Those that every user's targets are near to; the further ones are extras.
_NEAR = ("anole", "causal", "llamagen", "llava", "qwen")
_FURTHER = tuple(name for name in TARGETS if name not in _NEAR)

# What each group of extras is made of: folders end with a slash, beginnings of names with a
# low line. Everything else in TOPS is core.
EXTRAS = {
    "families": (
        *(f"models/targets/{n}/" for n in _FURTHER),
        *(f"data/families/{n}.py" for n in _FURTHER if (ROOT / "data" / "families" / f"{n}.py").exists()),
    ),
    "baseline drafters": tuple(
        f"models/drafters/{n}.py"
        for n in (
            "dflash", "dflash2", "dflash_files", "dflash_module", "dflash_proposal",
            "dflash_training", "dflash_settings", "dspark", "hivis", "llamagen", "msd", "mtp", "peagle",
            "pruned", "vispec",
        )
    ),
    "formats": ("models/formats/", "recipes/commands/importing.py", "recipes/commands/export.py",
                "recipes/commands/fetch.py"),
    "serving": (
        *(f"trainers/serve/{n}.py" for n in ("served",)), "trainers/serve/engine_",
        "trainers/serve/workers/", "trainers/evaluate/engine_", "eval/engines/", "recipes/commands/audit.py",
    ),
    "studies": (
        "eval/studies/", "trainers/evaluate/probes.py",
    ),
    "shapes": ("data/shapes/", "models/shapes_reader.py", "trainers/stages/generate.py"),
}  # fmt: skip
# Tests of the extras that mirror no file of theirs: files or folders, the project's own tools and pages among them.
_TESTS = (
    "docs", "pretend_cuda", "serving",
    "test_check_gpu.py", "test_goldens.py", "test_mutate.py",
    "test_bench.py", "test_budget.py", "test_torture.py", "test_wheel.py",
    "data/captioned", "data/families/test_towers.py", "eval/test_combinations.py", "eval/test_cycle_operations.py",
    "eval/test_quality.py", "eval/test_specvlm.py", "eval/test_text_quality.py", "eval/test_tiled.py",
    "eval/test_block.py", "eval/test_block_targets.py",
    "models/test_assistant.py", "models/test_captioners.py", "models/test_dflash2_layouts.py", "models/test_exports.py",
    "models/test_gguf.py", "models/test_gguf_drafts.py",
    "models/test_served_drafts.py", "models/test_imports.py", "models/test_speculators.py",
    "models/test_delta_rule.py", "models/test_tiled_drafts.py", "models/test_windows.py",
    "models/targets/test_hybrid.py", "models/targets/test_outside_section.py", "models/targets/test_towers.py",
    "recipes/test_fingerprints.py", "recipes/test_leaderboard.py",
    "recipes/test_over_seeds.py", "recipes/test_paper_settings.py", "recipes/test_paper_tables.py",
    "trainers/serve", "trainers/test_heads_stages.py",
    "trainers/test_judge.py", "trainers/test_outside_start.py", "trainers/test_recorded_ends.py",
    "trainers/test_suite_stage.py", "trainers/test_tower_stages.py", "trainers/test_weights_stage.py",
)  # fmt: skip
# Words by which code names a family; files with the word in their path are the family's own. `causal` is a word of
# everybody's, and qwen35 has qwen in it.
FAMILIES = tuple(n for n in TARGETS if n != "causal" and not any(n != o and n.startswith(o) for o in TARGETS))
METHODS = ("dflash", "dflash2", "dspark", "eagle", "eagle3", "hivis", "lantern", "lvlm", "medusa", "msd", "mtp",
           "peagle", "sparrow", "vispec")  # fmt: skip
# Names of files that mean the same in each room: what its classes derive from, its section of a recipe, its settings,
# its files on disk, what opens it, its loop.
IN_EACH_ROOM = ("base", "section", "config", "settings", "files", "load", "loop")
# The same in the folder of each target family: its record, model, decoder, target, training and packing of rows.
IN_EACH_FAMILY = ("model", "decoder", "target", "training", "packing")
# Rooms whose files are called by what users type: a command, a kind of stage.
TYPED = ("recipes/commands", "trainers/stages")


class Import(NamedTuple):
    """One import of a file of ours by another."""

    path: str
    target: str
    line: int
    for_types: bool  # under TYPE_CHECKING


def is_extra(path: str) -> bool:
    """Whether a file of the package is an extra, and so no part of the core."""
    return any(path == part or path.startswith(part) for group in EXTRAS.values() for part in group)


def mirrors(parts: Iterable[str], root: Path = ROOT) -> list[str]:
    """Files and folders below tests/ that are named as these parts of the package."""
    tests, paths = root / "tests", list[Path]()
    for part in parts:
        end = "*.py" if part.endswith("_") else "" if part.endswith(".py") else ".py"
        paths += (tests / part).parent.glob(f"test_{Path(part).name}{end}")
        paths += [tests / part] if part.endswith("/") and (tests / part).is_dir() else []
    return [str(path.relative_to(tests)) for path in paths]


def extra_tests() -> tuple[str, ...]:
    """Files and folders below tests/ that are tests of extras.

    Raises:
        SystemExit: one of `_TESTS` is not there.
    """
    if gone := [place for place in _TESTS if not (ROOT / "tests" / place).exists()]:
        raise SystemExit(f"scripts/house.py lists as tests of extras what is not there: {', '.join(gone)}")
    return (*mirrors(part for group in EXTRAS.values() for part in group), *_TESTS)


# Files of `models/targets` that import the families' folders, where the others are what families are made of.
_ABOVE_FAMILIES = [f"models/targets/{n}.py" for n in ("load", "parallel", "sizes", "table")]


def room(path: str) -> str:
    """The folder of a file; files above the target families are a room of their own."""
    return "models/targets above families" if path in _ABOVE_FAMILIES else str(Path(path).parent)


def trees(root: Path = ROOT) -> dict[str, ast.Module]:
    """Path below the root -> syntax tree, of all product files."""
    paths = sorted(p for top in TOPS for p in (root / top).rglob("*.py"))
    return {str(p.relative_to(root)): ast.parse(p.read_text()) for p in paths}


def imports(files: dict[str, ast.Module]) -> list[Import]:
    """All imports among the files, those inside functions and under TYPE_CHECKING included."""
    result = []
    for path, tree in files.items():
        typed = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and any("TYPE_CHECKING" in vars(part).values() for part in ast.walk(node.test))
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = Path(path).parents[node.level - 1] / (node.module or "").replace(".", "/")
                for alias in node.names:
                    places = (
                        f"{base}{end}" for base in (folder / alias.name, folder) for end in (".py", "/__init__.py")
                    )
                    target = next((place for place in places if place in files), None)
                    if target is not None and target != path:
                        result.append(Import(path, target, node.lineno, id(node) in typed))
    return sorted(set(result))


def two_way(links: Iterable[Import]) -> list[tuple[str, str]]:
    """Pairs of rooms that import each other."""
    edges = {(room(i.path), room(i.target)) for i in links}
    return sorted((a, b) for a, b in edges if a < b and (b, a) in edges)


def circles(links: Iterable[Import]) -> list[list[str]]:
    """The first circle of files that reach themselves by imports; an empty list: there is none."""
    graph: dict[str, set[str]] = defaultdict(set)
    for one in links:
        graph[one.path].add(one.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [sorted({*error.args[1]})]
    return []


def repeated_names(files: Iterable[str]) -> dict[str, int]:
    """File name -> in how many folders it stands, where that is more than one.

    A name may stand in several rooms where it means the same in each: a family, a method, and what `IN_EACH_ROOM`,
    `TYPED` and `IN_EACH_FAMILY` list.
    """
    of_families = {f"models/targets/{family}/{name}.py" for family in TARGETS for name in IN_EACH_FAMILY}
    counts = Counter(Path(path).name for path in files if room(path) not in TYPED and path not in of_families)
    same = {f"{name}.py" for name in ("__init__", *FAMILIES, *METHODS, *IN_EACH_ROOM)}
    return {name: n for name, n in sorted(counts.items()) if n > 1 and name not in same}


def naming(files: dict[str, ast.Module], family: str) -> list[str]:
    """Files whose code names a family, beside those of its own folders and of other families', which may build on it.

    Names are identifiers, imports, and strings of one word (letters, digits, dots and underscores), because such
    strings are compared and looked up. Docstrings, comments and prose do not count, and neither do names of
    repositories, files, data sets and commands: strings with a blank, a dash or a slash.
    """
    return [
        path
        for path, tree in files.items()
        if family not in path
        and not re.match(r"models/targets/\w+/", path)
        and any(family in word for word in _words(tree))
    ]


@functools.cache
def _words(tree: ast.Module) -> frozenset[str]:
    """Names and strings of one word in a file's code, in small letters."""
    texts = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    words = {
        getattr(n, field, None)
        for n in ast.walk(tree)
        if id(n) not in texts
        for field in ("id", "attr", "arg", "name", "module", "value")
    }
    return frozenset(word.lower() for word in words if isinstance(word, str) and re.fullmatch(r"[\w.]+", word))


def files_of(root: Path, suffix: str) -> list[str]:
    """Files with an ending, below the root: no environments, runs or builds."""
    skipped = {"runs", "build", "dist", "site"}
    paths = (path.relative_to(root) for path in root.rglob(f"*{suffix}") if path.is_file())
    return sorted(
        str(path)
        for path in paths
        if not any(part in skipped or (part[0] == "." and part not in (".ci", ".github")) for part in path.parts[:-1])
        and not any(part.endswith(".egg-info") for part in path.parts)
        and path.parts[0] != "weights"  # what `draftsmith fetch` writes
    )


def lines_of(path: Path) -> int:
    """Lines of a file; of a notebook those of its code cells."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        return sum(len("".join(cell["source"]).splitlines()) for cell in cells if cell["cell_type"] == "code")
    return path.read_text().count("\n")


def product(root: Path = ROOT) -> dict[str, int]:
    """File -> lines, of all that tests/budget.yaml calls product."""
    python = [path for path in files_of(root, ".py") if not path.startswith("tests/")]
    others = [path for end in (".jinja", ".ipynb") for path in files_of(root, end)]
    scripts = [
        str(path.relative_to(root))
        for folder in ("scripts", ".ci")
        for path in sorted((root / folder).rglob("*"))
        if path.is_file() and (path.suffix == ".sh" or path.read_bytes()[:2] == b"#!")
    ]
    return {path: lines_of(root / path) for path in dict.fromkeys([*python, *others, *scripts])}


def totals(root: Path = ROOT) -> dict[str, int]:
    """The four numbers that tests/budget.yaml bounds."""
    lines = product(root)
    tests = [path for path in files_of(root, ".py") if path.startswith("tests/")]
    pages = [path for path in files_of(root, ".md") if not path.startswith("tests/")]
    return {
        "product_lines": sum(lines.values()),
        "product_files": len(lines),
        "test_lines": sum(lines_of(root / path) for path in tests),
        "page_words": sum(len((root / path).read_text().split()) for path in pages),
    }


def main() -> None:
    """Print the totals and the table."""
    bounds = yaml.safe_load((ROOT / "tests" / "budget.yaml").read_text())["totals"]
    files = trees()
    links = imports(files)
    written = [ast.get_docstring(node) or "" for tree in files.values() for node in ast.walk(tree)
               if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]  # fmt: skip
    families = {family: len(naming(files, family)) for family in FAMILIES}
    rows = {
        **{f"{name} (at most {bounds[name]:,})": f"{number:,}" for name, number in totals().items()},
        "lines: core": sum(lines_of(ROOT / path) for path in files if not is_extra(path)),
        "lines: extras": sum(lines_of(ROOT / path) for path in files if is_extra(path)),
        "public methods of DrafterConfig (at most 16)": public_methods("models/drafters/base.py", "DrafterConfig"),
        "public methods of Stage (at most 14)": public_methods("trainers/run/stage.py", "Stage"),
        "core files that import extras": len({i.path for i in links if not is_extra(i.path) and is_extra(i.target)}),
        "two-way pairs of rooms": len(two_way(links)),
        "circles of files": len(circles(links)),
        "file names that stand more than once": len(repeated_names(files)),
        "docstrings that begin with Of, As, With (goal 0)": sum(t.startswith(("Of ", "As ", "With ")) for t in written),
        "files that name a family beside its own": ", ".join(f"{f} {n}" for f, n in families.items()),
    }
    for name, value in rows.items():
        print(f"| {name} | {value} |")


def public_methods(path: str, name: str) -> int:
    """Methods and properties of a class whose names begin without a low line."""
    (node,) = (n for n in ast.parse((ROOT / path).read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)
    return sum(isinstance(part, ast.FunctionDef) and part.name[0] != "_" for part in node.body)


if __name__ == "__main__":
    main()
