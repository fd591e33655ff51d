"""The repository weighs at most what tests/budget.yaml says, and what is counted is what its head says."""

import json
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
house = sys.modules["house"]  # conftest.py has loaded it
BUDGET = yaml.safe_load((ROOT / "tests" / "budget.yaml").read_text())


@pytest.mark.parametrize("name", BUDGET["totals"])
def test_a_total_is_within_its_bound(name):
    measured = house.totals()[name]
    assert measured <= BUDGET["totals"][name], f"{name}: {measured:,} (python scripts/house.py)"


def test_what_counts(tmp_path):
    cells = [{"cell_type": "code", "source": ["a\n", "b"]}, {"cell_type": "markdown", "source": ["c"]}]
    files = {
        "core/a.py": "1\n2\n", "serving/b.py": "1\n", "scripts/run": "#!/bin/sh\n2\n3\n",
        "scripts/environment.sh": "1\n", "scripts/cluster/hostfile": "worker\n", ".ci/run": "#!/bin/bash\n",
        "eval/page.html.jinja": "1\n",
        "docs/notebooks/n.ipynb": json.dumps({"cells": cells}), "docs/a.md": "one two\nthree", ".github/b.md": "four",
        "tests/test_a.py": "1\n2\n3\n", "tests/tools/t.py": "1\n", "tests/a.md": "five", ".venv/c.py": "1\n",
        "build/d.py": "1\n", "runs/e.md": "six", "core/a.yaml": "a: 1\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert house.totals(tmp_path) == {"product_lines": 11, "product_files": 7, "test_lines": 4, "page_words": 4}
