"""Modules that moved are found under the names that pages gave them before."""

import importlib
import subprocess
import sys

import draftsmith
import pytest


@pytest.mark.parametrize("old", draftsmith._MOVED)
def test_the_old_name_gives_the_same_module_and_says_the_new_one(old):
    code = (
        "import importlib, warnings\n"
        f"with warnings.catch_warnings(record=True) as told:\n    warnings.simplefilter('always')\n"
        f"    module = importlib.import_module('draftsmith.{old}')\n"
        "print(module.__name__, module.__spec__.name, [str(w.message) for w in told if 'now' in str(w.message)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = f"draftsmith.{draftsmith._MOVED[old]}"
    assert done.stdout.strip() == f"{new} {new} ['draftsmith.{old} is {new} now']"


def test_a_name_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"draftsmith\.data\.nothing"):
        importlib.import_module("draftsmith.data.nothing")
