"""Modules that moved are found under the names that pages gave them before."""

import importlib
import subprocess
import sys

import draftsmith
import pytest

IMPORTS = """
import importlib, sys, warnings
for old in sys.argv[1:]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = importlib.import_module(f"draftsmith.{old}")
    print(module.__name__, module.__spec__.name, [str(w.message) for w in told if "now" in str(w.message)])
"""


def test_the_old_name_gives_the_same_module_and_says_the_new_one():
    command = [sys.executable, "-c", IMPORTS, *draftsmith._MOVED]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for line, (old, name) in zip(said, draftsmith._MOVED.items(), strict=True):
        new = f"draftsmith.{name}"
        assert line == f"{new} {new} ['draftsmith.{old} is {new} now']"


def test_a_name_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"draftsmith\.data\.nothing"):
        importlib.import_module("draftsmith.data.nothing")
