"""The table of what is fast: each file of the folder is in it, and each readable function is there."""

import importlib
from pathlib import Path

import pytest
from draftsmith.models import fast


def test_every_file_of_the_folder_is_in_the_table():
    files = {path.stem for path in Path(fast.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == fast.STANDS_IN_FOR.keys()


@pytest.mark.parametrize("name", fast.STANDS_IN_FOR)
def test_what_a_file_stands_in_for_is_there(name):
    importlib.import_module(f"draftsmith.models.fast.{name}")
    file, functions, _ = fast.STANDS_IN_FOR[name]
    module = importlib.import_module("draftsmith." + file.removesuffix(".py").replace("/", "."))
    for function in functions:
        value = module
        for part in function.split("."):
            value = getattr(value, part)
        assert callable(value)


@pytest.mark.parametrize(("value", "enabled"), [(None, True), ("1", True), ("0", False)])
def test_the_environment_says_whether_they_run(value, enabled, monkeypatch):
    monkeypatch.delenv("DRAFTSMITH_FAST", raising=False)
    if value is not None:
        monkeypatch.setenv("DRAFTSMITH_FAST", value)
    assert fast.enabled() == enabled
