"""The recorded dry run of a shipped recipe. tests/test_goldens.py compares each recipe with its record, so that
other tests read the record and need no dry run of their own.
"""

from pathlib import Path

import pytest
from draftsmith.recipes.config.files import FOLDER, find_recipe, recipe_names

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "dry-runs"


def recorded_dry_run(name: str) -> str:
    """What `draftsmith recipe=NAME dry_run=true` says. It ends with the exit code where that is not 0."""
    path = find_recipe(name).relative_to(FOLDER).with_suffix("")
    return (GOLDENS / f"{str(path).replace('/', '.')}.txt").read_text()


def first_of_each_folder() -> list:
    """Parameters: the names of all shipped recipes; all but the first of each folder of recipes/ are slow tests."""
    first: dict[Path, str] = {}
    for name, path in recipe_names().items():
        first.setdefault(path.parent, name)
    return [
        pytest.param(name, marks=() if name in first.values() else pytest.mark.slow, id=name) for name in recipe_names()
    ]
