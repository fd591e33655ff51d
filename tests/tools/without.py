#!/usr/bin/env python
"""Shows that a group of extras can be deleted: copies the tree, deletes it, and runs tests of the core on the rest.

    tests/tools/without.py studies             # eval/studies, and what of trainers/evaluate makes studies
    tests/tools/without.py families            # families beside LLaVA, Qwen-VL, text and image generators
    tests/tools/without.py serving --whole     # eval/engines and trainers/serve's engines; all tests of the core
    tests/tools/without.py studies tests/eval  # tests of one's own choice

What is deleted is the group of `EXTRAS` in scripts/house.py, with its lines in the tables that name core and extras:
imports are found, and `LINES` has the rest. A test of the core that still needs the extra fails.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
assert _SPEC is not None and _SPEC.loader is not None
house = sys.modules["house"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(house)

# Group -> files -> lines of tables and recipes that name what is deleted (patterns), and what stands there then.
LINES = {
    "studies": {
        "trainers/evaluate/studies.py": {r" = \((clip_tables|analysis|check_analysis),\)": " = ()",
                                         r" = \(recorded_weights, probe\)": " = ()"},
        "trainers/evaluate/probe_settings.py": {r"analysis: AnalysisConfig \| None": "analysis: None"},
        "recipes/demo/visual-ar*.yaml": {r" *probes: \{analysis: .*\n": ""},
        "recipes/visual_ar/eagle-*.yaml": {r" *probes: \{analysis: .*\n": ""},
        # Cases of tests of the core.
        "tests/recipes/test_check.py": {r" *\(\"demo/visual-ar\", \"stages.evaluate.probes.analysis.*\n": ""},
        "tests/trainers/test_one_table.py": {r" *\"probes of pictures, said\": .*\n": ""},
    },
    "serving": {
        "trainers/serve/engines.py": {r"= Annotated\[.*": "= TransformersEngine"},
        "trainers/evaluate/studies.py": {r"= \{\"vllm\": run_in_engine\}": "= {}"},
        "recipes/commands/cli.py": {r"        (bench|verify_engine)\.COMMAND,\n": "",
                                     r"    (bench|verify_engine),\n": ""},
    },
    "families": {
        "models/targets/table.py": {r"    \| (Qwen35|InternVL|Mistral|Gemma)TargetConfig\n": ""},
        "data/families/table.py": {r"\(PIXTRAL, ": "(", r", INTERNVL, GEMMA\)": ")"},
        "tests/layout_exceptions.yaml": {r", mistral: \d+": ""},
        # Cases of tests of the core.
        "tests/eval/test_head_decoding.py": {r', "qwen3_5"\]': "]"},
        "tests/trainers/test_estimate_counted.py": {r', "qwen3_5"\]': "]"},
        "tests/models/test_sizes.py": {r' *"(qwen3\.5|internvl3|mistral|gemma|pixtral)-.*\n': ""},
        "tests/trainers/test_qwen_stages.py": {r"\n\ndef test_a_native_head_(.|\n)*?(?=\n\n\n|\Z)": "\n"},
    },
}  # fmt: skip
# Recipes that want the group.
RECIPES = {
    "studies": (),
    "serving": ("lvlm/compare-served", "smollm2/served"),
    "families": (
        "video/eagle3-gemma-4-e4b", "video/eagle3-internvl3-8b", "video/eagle3-mistral-small-3.1-24b",
        "video/eagle3-qwen3.5-9b", "video/mtp-qwen3.5-9b",
    ),
}  # fmt: skip
# What a change of the tables touches first: the shape of the tree, stages, one that asks its engine, a report.
SOME = (
    "tests/test_layout.py", "tests/trainers/test_stages.py", "tests/trainers/test_regenerate.py",
    "tests/eval/test_end_token.py", "tests/eval/test_cells.py", "tests/eval/test_nothing_measured.py",
)  # fmt: skip


def copied(folder: Path) -> Path:
    """The files that git knows, as they are now, in a folder named as the package."""
    root = folder / "draftsmith"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    return root


def delete(root: Path, group: str) -> list[str]:
    """Delete the group's files, their tests, its recipes and its lines in the tables; return the files.

    Raises:
        SystemExit: a line of `LINES` is not there.
    """
    parts = house.EXTRAS[group]
    files = house.trees(root)
    gone = [path for path in files if any(path == part or path.startswith(part) for part in parts)]
    tables = {one.path for one in house.imports(files) if one.target in gone} - {*gone}
    for path in (*gone, *(f"recipes/{name}.yaml" for name in RECIPES[group])):
        (root / path).unlink()
    for path in house.mirrors(parts, root):
        place = root / "tests" / path
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    for path in tables:
        text = (root / path).read_text()
        lines = text.splitlines(keepends=True)
        for one in house.imports(files):
            if one.path == path and one.target in gone and "(" not in lines[one.line - 1]:
                lines[one.line - 1] = ""
        (root / path).write_text("".join(lines))
    for paths, patterns in LINES[group].items():
        for pattern, new in patterns.items():
            found = [(path, re.subn(pattern, new, path.read_text())) for path in root.glob(paths)]
            for path, (text, _) in found:
                path.write_text(text)
            if not any(count for _, (_, count) in found):
                raise SystemExit(f"{paths}: no line {pattern}")
    # The lists that tests compare with the tree: packages, extras, tables that still name one, exceptions.
    others = {one.path for one in house.imports(files) if house.is_extra(one.target) and one.target not in gone}
    packages = [f"draftsmith.{part.rstrip('/').replace('/', '.')}" for part in parts]
    edits = {
        "pyproject.toml": [rf' *"{re.escape(package)}(\.\w+)*",\n?' for package in packages],
        "scripts/house.py": [rf'    "{group}": \(.*?^    \),\n'],
        "tests/test_layout.py": [rf'    "{re.escape(path)}",\n' for path in tables - others],
        "tests/layout_exceptions.yaml": [rf"^  {re.escape(path)}:.*\n(    - .*\n)*" for path in gone],
    }
    for path, texts in edits.items():
        text = (root / path).read_text()
        for pattern in texts:
            text = re.sub(pattern, "", text, flags=re.M | (re.S if path == "scripts/house.py" else 0))
        (root / path).write_text(text)
    return gone


def main() -> int:
    """Exit code of the tests."""
    group, *asked = sys.argv[1:] or [""]
    if group not in LINES:
        raise SystemExit(f"name a group: {', '.join(LINES)}")
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        gone = delete(root, group)
        for step in ("init -q", "add -A", "-c user.name=- -c user.email=- commit -q -m rest"):
            subprocess.run(["git", *step.split()], cwd=root, check=True)
        print(f"deleted {len(gone)} files of {group}: {', '.join(gone)}", flush=True)
        tests = asked or [test for test in SOME if (root / test).exists()]
        if asked == ["--whole"]:  # as scripts/test
            tests = ["--numprocesses", str((os.cpu_count() or 1) + 1), "--dist", "loadfile", "--no-loadscope-reorder"]
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tier=core", *tests]
        return subprocess.run(command, cwd=root, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
