"""Of all tests: what stays for the whole run is kept out of the garbage collector's way."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _imports_are_not_searched_for_garbage():
    """DeepSpeed collects garbage a score of times for each engine, and a third of a second long each time where it must
    look through all that transformers and torch have imported. Models that are garbage by now are collected first.
    """
    gc.collect()
    gc.freeze()
