"""Numbers of the code: lines of core and extras, rooms that import each other, circles, names, and how far a step goes.

    python scripts/house.py                                              # the table; tests/test_layout.py has the rules
    python scripts/house.py trainers.train.loop:_forward_backward recipe=...   # runs it; lists what that enters

Core is what every user passes through. Extras are further target families, baseline drafters, other tools' formats,
engines' serving, the papers' studies and the synthetic dataset. A room is a folder; its files stand directly in it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

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
            "dflash", "dflash2", "dflash_confidence", "dflash_files", "dflash_images", "dflash_module",
            "dflash_training", "dflash_settings", "dflash_walk", "dspark", "hivis", "llamagen", "msd", "mtp", "peagle",
            "pruned", "vispec",
        )
    ),
    "formats": ("models/formats/", "recipes/importing.py", "recipes/commands/export.py",
                "recipes/commands/fetch.py", "recipes/commands/import_drafter.py"),
    "serving": (
        *(f"trainers/serve/{n}.py" for n in ("served",)), "trainers/serve/engine_",
        "trainers/serve/workers/", "trainers/evaluate/engine_", "eval/engines/", "recipes/commands/verify_engine.py",
        "recipes/commands/bench.py",
    ),
    "studies": (
        "eval/studies/",
        *(f"trainers/evaluate/{n}.py" for n in ("clip_tables", "drawn_analysis", "probes", "recorded_weights")),
    ),
    "shapes": ("data/shapes/", "models/shapes_reader.py", "trainers/stages/generate.py"),
}  # fmt: skip
# Tests of the extras that mirror no file of theirs: files or folders, the project's own tools and pages among them.
_TESTS = (
    "docs", "pretend_cuda", "serving",
    "test_check_gpu.py", "test_goldens.py", "test_mutants.py", "test_mutate.py", "test_peers.py",
    "test_bench.py", "test_torture.py", "test_wheel.py",
    "data/captioned", "data/families/test_towers.py", "eval/test_combinations.py", "eval/test_cycle_operations.py",
    "eval/test_quality.py", "eval/test_specvlm.py", "eval/test_text_quality.py", "eval/test_tiled.py",
    "eval/test_block.py", "eval/test_block_targets.py",
    "models/test_assistant.py", "models/test_captioners.py", "models/test_dflash2_layouts.py", "models/test_exports.py",
    "models/test_gguf.py", "models/test_served_drafts.py", "models/test_imports.py", "models/test_speculators.py",
    "models/test_delta_rule.py", "models/test_tiled_drafts.py", "models/test_windows.py",
    "models/targets/test_hybrid.py", "models/targets/test_outside_section.py", "models/targets/test_towers.py",
    "recipes/test_fingerprints.py", "recipes/test_imports.py", "recipes/test_leaderboard.py",
    "recipes/test_over_seeds.py", "recipes/test_paper_settings.py", "recipes/test_paper_tables.py",
    "trainers/serve", "trainers/test_demo_ov.py", "trainers/test_distill_demo.py", "trainers/test_heads_stages.py",
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
IN_EACH_FAMILY = ("family", "model", "decoder", "target", "training", "packing")
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
    tests, found = root / "tests", list[Path]()
    for part in parts:
        end = "*.py" if part.endswith("_") else "" if part.endswith(".py") else ".py"
        found += (tests / part).parent.glob(f"test_{Path(part).name}{end}")
        found += [tests / part] if part.endswith("/") and (tests / part).is_dir() else []
    return [str(path.relative_to(tests)) for path in found]


def extra_tests() -> tuple[str, ...]:
    """Files and folders below tests/ that are tests of extras.

    Raises:
        SystemExit: one of `_TESTS` is not there.
    """
    if gone := [place for place in _TESTS if not (ROOT / "tests" / place).exists()]:
        raise SystemExit(f"scripts/house.py lists as tests of extras what is not there: {', '.join(gone)}")
    return (*mirrors(part for group in EXTRAS.values() for part in group), *_TESTS)


def room(path: str) -> str:
    """The folder of a file."""
    return str(Path(path).parent)


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


def two_way(found: Iterable[Import]) -> list[tuple[str, str]]:
    """Pairs of rooms that import each other."""
    edges = {(room(i.path), room(i.target)) for i in found}
    return sorted((a, b) for a, b in edges if a < b and (b, a) in edges)


def circles(found: Iterable[Import]) -> list[list[str]]:
    """Files that reach themselves by imports, each with all that it reaches and that reach it."""
    graph: dict[str, set[str]] = defaultdict(set)
    for one in found:
        graph[one.path].add(one.target)
    reached = {path: _reached(graph, path) for path in graph}
    groups = {tuple(sorted(p for p in to if path in reached.get(p, ()))) for path, to in reached.items() if path in to}
    return [list(group) for group in sorted(groups)]


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    result: set[str] = set()
    open_paths = [start]
    while open_paths:
        more = graph.get(open_paths.pop(), set()) - result
        result |= more
        open_paths += more
    return result


def repeated_names(files: Iterable[str]) -> dict[str, int]:
    """File name -> in how many folders it stands, where that is more than one.

    A name may stand in several rooms where it means the same in each. A family (`qwen.py`) or a method (`eagle.py`) is
    one thing, of which each room holds its part: the target, the head, the layout that others publish. A room's
    `section.py` is always its section of a recipe, and so on (`IN_EACH_ROOM`). A command and a stage (`TYPED`) are
    called as users call them, whatever else has that name. The folder of a target family has the files of each
    (`IN_EACH_FAMILY`).
    """
    of_families = {f"models/targets/{family}/{name}.py" for family in TARGETS for name in IN_EACH_FAMILY}
    counts = Counter(Path(path).name for path in files if room(path) not in TYPED and path not in of_families)
    same = {f"{name}.py" for name in ("__init__", *FAMILIES, *METHODS, *IN_EACH_ROOM)}
    return {name: n for name, n in sorted(counts.items()) if n > 1 and name not in same}


def code_lines(path: Path) -> int:
    """Lines with code: no docstrings, comments or blanks."""
    tree = ast.parse(path.read_text())
    texts = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with tokenize.open(path) as file:
        tokens = [t for t in tokenize.generate_tokens(file.readline) if t.type not in skipped]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - texts)


def _shares(files: dict[str, ast.Module]) -> tuple[int, int]:
    """(public functions with tensors in their signature and a docstring, those whose docstring has a shape)."""
    total = shapes = 0
    for tree in files.values():
        hidden = {
            id(n) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) and c.name[0] == "_" for n in ast.walk(c)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name[0] != "_" and id(node) not in hidden:
                notes = [a.annotation for a in (*node.args.args, *node.args.kwonlyargs)] + [node.returns]
                text = ast.get_docstring(node)
                if text and any(n is not None and "Tensor" in ast.unparse(n) for n in notes):
                    total += 1
                    shapes += bool(re.search(r"\[[A-Z0-9|][\w,|+*/. ()-]*\]", text))
    return total, shapes


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
    found = {
        getattr(n, field, None)
        for n in ast.walk(tree)
        if id(n) not in texts
        for field in ("id", "attr", "arg", "name", "module", "value")
    }
    return frozenset(word.lower() for word in found if isinstance(word, str) and re.fullmatch(r"[\w.]+", word))


def entered(place: str, arguments: list[str]) -> list[tuple[str, str]]:
    """Run a recipe, and list (file, function) of the package that one function enters, in the order of first calls.

    Args:
        place: MODULE:FUNCTION or MODULE:CLASS.METHOD, as `trainers.train.loop:_forward_backward`.
        arguments: those of `draftsmith`.
    """
    from draftsmith.recipes.commands.cli import main as draftsmith

    module, _, name = place.partition(":")
    owner: Any = importlib.import_module(f"draftsmith.{module}")
    for part in name.split(".")[:-1]:
        owner = getattr(owner, part)
    function = getattr(owner, name.split(".")[-1])
    seen: dict[tuple[str, str], None] = {}

    def look(frame: Any, event: str, argument: Any) -> None:
        path, entered = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in TOPS
        if event == "call" and ours and "<" not in entered.rpartition(".")[2]:
            seen.setdefault((str(path.relative_to(ROOT)), entered))

    def counted(*positional: Any, **named: Any) -> Any:
        sys.setprofile(look)
        try:
            return function(*positional, **named)
        finally:
            sys.setprofile(None)

    setattr(owner, name.split(".")[-1], counted)
    if draftsmith(arguments):
        raise SystemExit("the run failed")
    return [*seen]


def unwritten(sections: Iterable[Any]) -> list[str]:
    """Keys of sections that stand in no recipe, and on no hand-written page of docs/ as code (backticks or a block)."""
    pages = [p.read_text() for p in (ROOT / "docs").rglob("*.md") if p.parent.name not in ("decisions", "results")]
    code = re.findall(r"(?ms)^```.*?^```|`[^`\n]*`|^    [^\n]*", "\n".join(pages))
    written = set(re.findall(r"\w+", " ".join(code)))
    waiting = [yaml.safe_load(p.read_text()) for p in (ROOT / "recipes").rglob("*.yaml")]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            written |= node.keys()
        waiting += [*node.values()] if isinstance(node, dict) else node if isinstance(node, list) else []
    keys = {field.alias or name for section in sections for name, field in section.model_fields.items()}
    return sorted(keys - written)


def main() -> None:
    """Print the table, or what a function enters."""
    if len(sys.argv) > 1 and ":" not in sys.argv[1]:
        raise SystemExit(__doc__)
    if len(sys.argv) > 1:
        seen = entered(sys.argv[1], sys.argv[2:])
        for path, name in seen:
            print(f"{path}  {name}")
        classes = {(path, name.rpartition(".")[0]) for path, name in seen if "." in name and "<locals>" not in name}
        print(f"files {len({path for path, _ in seen})}, functions {len(seen)}, classes {len(classes)}")
        return
    import reference  # imports the package

    files = trees()
    found = imports(files)
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in files}
    code = {path: code_lines(ROOT / path) for path in files}
    every = [node for tree in files.values() for node in ast.walk(tree)]
    calls = Counter(n.func.id for n in every if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
    thousand = sum(code.values()) / 1000
    scripts = [p for p in (ROOT / "scripts").rglob("*.py")]
    names = repeated_names(files)
    tensors, shapes = _shares(files)
    written = [ast.get_docstring(n) or "" for n in every if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    families = {family: len(naming(files, family)) for family in FAMILIES}
    rows = {
        "lines: core": sum(n for path, n in lines.items() if not is_extra(path)),
        "lines: extras": sum(n for path, n in lines.items() if is_extra(path)),
        "lines: scripts": sum(len(p.read_text().splitlines()) for p in scripts),
        "code lines: core": sum(n for path, n in code.items() if not is_extra(path)),
        "core files that import extras": len({i.path for i in found if not is_extra(i.path) and is_extra(i.target)}),
        "two-way pairs of rooms": len(two_way(found)),
        "circles of files": len(circles(found)),
        "file names that stand more than once": len(names),
        "Any per 1,000 code lines": round(sum(isinstance(n, ast.Name) and n.id == "Any" for n in every) / thousand, 2),
        "getattr + hasattr per 1,000": round((calls["getattr"] + calls["hasattr"]) / thousand, 2),
        "isinstance per 1,000": round(calls["isinstance"] / thousand, 2),
        "docstrings with shapes, of functions of tensors": f"{shapes} of {tensors} ({shapes / tensors:.0%})",
        "docstrings that begin with Of, As, With (goal 0)": sum(t.startswith(("Of ", "As ", "With ")) for t in written),
        "files that name a family beside its own": ", ".join(f"{f} {n}" for f, n in families.items()),
        "settings in no recipe and on no hand-written page": len(unwritten(reference.reachable())),
    }
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
