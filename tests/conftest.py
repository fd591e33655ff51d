"""The tiers of the tests, and what keeps them quick: products of parameters in part, garbage collected seldom.

None is collected before the first test runs: looking for it takes a quarter of the time of the imports.
"""

import gc
import importlib.util
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
_SPEC = importlib.util.spec_from_file_location("house", HERE.parent / "scripts" / "house.py")
house = sys.modules["house"] = importlib.util.module_from_spec(_SPEC)  # its classes look their module up
_SPEC.loader.exec_module(house)
EXTRAS = house.extra_tests()  # everything else is the core


gc.disable()


def pytest_collection_finish():
    gc.freeze()  # what was imported and collected is none
    gc.enable()


def pytest_addoption(parser):
    parser.addoption("--tier", choices=("core", "extras", "all"), default="all", help="which of the default tests")


def pytest_ignore_collect(collection_path, config):
    """Files of the other tier are not even imported."""
    tier = config.getoption("tier")
    if tier == "all" or collection_path.suffix != ".py":
        return None
    place = collection_path.relative_to(HERE)
    is_extra = any(str(part) in EXTRAS for part in (place, *place.parents))
    return True if is_extra == (tier == "core") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked `covering`, whose parameters are a product, most combinations are slow: the sum of the places of
    a case's values is a multiple of the second longest list's length. Each value of each parameter stays, and so does
    each pair of values of the longest and of any but the second longest.
    """
    products = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering"):
            products[item.nodeid.split("[")[0]].append(item)
    for cases in products.values():
        # A part of the id for each parametrisation. A case that is asked for by its own name is the only one: it runs.
        named = [case.callspec._idlist for case in cases]
        axes = [list(dict.fromkeys(names)) for names in zip(*named, strict=True)]
        second_longest = sorted(map(len, axes))[-2]
        for case, names in zip(cases, named, strict=True):
            if sum(axis.index(name) for axis, name in zip(axes, names, strict=True)) % second_longest:
                case.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def _imports_are_not_searched_for_garbage():
    """DeepSpeed collects garbage a score of times for each engine, and a third of a second long each time where it must
    look through all that transformers and torch have imported. Models that are garbage by now are collected first.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def wandb(monkeypatch):
    from fake_wandb import FakeWandb

    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake
