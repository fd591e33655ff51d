"""Of all tests: products of parameters in two tiers, and what stays is kept out of the garbage collector's way."""

import gc
from collections import defaultdict

import pytest


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
