"""Readers of a value's shape, and the walk over a tree: what has another shape is None, and nothing is passed over."""

import tracemalloc

import pytest
from draftsmith.core import json_types
from draftsmith.core.json_types import all_are, list_at, listed, object_at, parts, text_at, value_at, walk, with_each

TREE = {"a": {"b": [{"c": "text"}, 2]}, "n": None}


def test_a_path_leads_through_objects_and_lists():
    assert value_at(TREE) is TREE and value_at(TREE, "a", "b", "0", "c") == text_at(TREE, "a", "b", "0", "c") == "text"
    assert object_at(TREE, "a", "b", "0") == {"c": "text"} and list_at(TREE, "a", "b") == [{"c": "text"}, 2]


@pytest.mark.parametrize("path", ["x", "n", "n.x", "a.b.2", "a.b.-1", "a.b.c", "a.b.1.c", "a.b.0.c.0"])
def test_a_path_that_leads_nowhere_is_none(path):
    assert value_at(TREE, *path.split(".")) is None


def test_nan_behind_a_long_text_is_named_within_little_memory():
    tracemalloc.start()
    text = '{"picture": "' + r"NaN\n\"" * 10**5 + '", "score": NaN}'
    with pytest.raises(ValueError, match=rf"NaN is no JSON .write null.: line 1 column {len(text) - 3} "):
        json_types.parse(text)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_another_shape_is_none():
    for read, kind in ((object_at, dict), (list_at, list), (text_at, str)):
        for value in ({}, [], "", 0, False, None, ("a",)):
            assert read(value) == (value if type(value) is kind else None), (read, value)


def test_one_value_or_several():
    assert listed(None) == [] and listed("ab") == ["ab"] and listed(("a", "b")) == listed(["a", "b"]) == ["a", "b"]
    assert listed({"a": 1}) == [{"a": 1}]
    assert all_are(["a"], str) and all_are([], str)
    assert not all_are(["a", 1], str) and not all_are("a", str) and not all_are(None, str)


def test_the_walk_meets_each_value_after_what_holds_it():
    assert [place for place, _ in walk(TREE)] == [
        (), ("a",), ("a", "b"), ("a", "b", "0"), ("a", "b", "0", "c"), ("a", "b", "1"), ("n",)
    ]  # fmt: skip
    assert all(value == value_at(TREE, *place) for place, value in walk(TREE))
    assert [*parts("text")] == [] and [*parts((5,))] == [(0, 5)]


def test_texts_are_changed_and_keys_stay():
    assert with_each({"a": ["a", ("a", 1)]}, str, str.upper) == {"a": ["A", ["A", 1]]}
