"""The shape of the repository: packages, import direction and one door per heavy dependency."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = {"core": 0, "data": 1, "models": 1, "eval": 2, "trainers": 3, "recipes": 4}
DOORS = {
    "deepspeed": {"trainers/engine.py"},
    "omegaconf": {"recipes/interpolation.py"},
    "wandb": {"core/tracking.py"},
    "matplotlib": {
        "eval/style.py",
        *(f"eval/studies/drawn/{n}_figures.py" for n in ("map", "share", "method")),
    },
    "webdataset": {"data/shapes/captioned.py"},
    "peft": {"models/lora.py"},
    "pandas": {"eval/summary.py"},
    "jinja2": {"core/templates.py"},
    "av": {"data/videos.py"},
    "datasets": {"data/suite_hub.py", "data/table_records.py"},
    "torchmetrics": {"eval/text_quality.py"},
    "nltk": {"eval/text_quality.py"},
}


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
