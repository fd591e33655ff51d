"""tests/tools/mutate.py: planted faults, and the tests that must notice; the slow tier runs all of it, for minutes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "tools" / "mutate.py"


@pytest.fixture(scope="module")
def mutate():
    spec = importlib.util.spec_from_file_location("mutate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], cwd=ROOT, capture_output=True, text=True,
                          check=False)  # fmt: skip


def table(folder: Path, rows: dict) -> Path:
    path = folder / "table.yaml"
    path.write_text(yaml.safe_dump(rows))
    return path


def test_a_table_that_is_stale_is_told_by_the_faults_name(mutate, tmp_path):
    rows = {
        "tests/test_layout.py tests/none.py": {
            "gone": ["core/batch.py", "no such text", "x"], "twice": ["core/batch.py", "import", "x"],
            "same": ["core/batch.py", "from __future__", "from __future__"], "elsewhere": ["core/none.py", "a", "b"],
        },
    }  # fmt: skip
    told = "\n".join(mutate.stale(mutate.read_table(table(tmp_path, rows)), ROOT))
    for name, problem in {
        "gone": "the old text stands 0 times in core/batch.py",
        "twice": f"the old text stands {(ROOT / 'core/batch.py').read_text().count('import')} times in core/batch.py",
        "same": "the new text is the old one",
        "elsewhere": "the old text stands 0 times in core/none.py",
    }.items():
        assert f"{name}: {problem}" in told and f"{name}: no test tests/none.py" in told
    with pytest.raises(AssertionError, match="two faults are called"):
        mutate.read_table(table(tmp_path, rows | {"tests/test_goldens.py": {"gone": ["a", "b", "c"]}}))


def test_every_fault_of_the_table_can_be_planted(mutate):
    """Each text stands once, each test is there, and what is planted is Python."""
    faults = mutate.read_table(mutate.TABLE)
    assert mutate.stale(faults, ROOT) == []
    for fault in faults:
        compile((ROOT / fault.file).read_text().replace(fault.old, fault.new), fault.name, "exec", dont_inherit=True)


def test_the_table_is_read_whole(mutate):
    faults = mutate.read_table(mutate.TABLE)
    # YAML drops the first of two groups that have the same tests.
    assert len(faults) == sum(line.startswith("  ") for line in mutate.TABLE.read_text().splitlines())
    assert len(faults) >= 180 and all(fault.tests for fault in faults)


@pytest.mark.slow
def test_a_fault_that_nothing_notices_survives(tmp_path):
    rows = {
        "tests/eval/test_rows.py": {
            "a comment": ["core/batch.py", "from __future__", "# nothing\nfrom __future__"],
            "the first repeat alone": [
                "eval/measured_rows.py",
                "for generation in (*plain, *drafted))",
                "for generation in (plain[0], drafted[0]))",
            ],
        },
    }  # fmt: skip
    done = command("--table", str(table(tmp_path, rows)))
    assert done.returncode == 1 and "1 of 2 killed, 1 survived, 0 without an answer" in done.stdout, done.stderr
    done = command("--table", str(table(tmp_path, rows)), "repeat")
    assert done.returncode == 0 and "1 of 1 killed" in done.stdout
    assert command("no such fault").returncode == 2


@pytest.mark.slow
def test_known_faults_are_noticed():
    done = command("--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
