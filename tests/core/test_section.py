"""Sections of recipes refuse what cannot be meant."""

import typing

from draftsmith.core.section import Section
from draftsmith.recipes import schema

# Layers are counted from the end as well; the others are compared by validators, or are parts of a tuple.
_OTHERWISE = {"vision_feature_layer", "depth_range", "width_range", "shares", "ch_mult"}


def sections() -> list[type[Section]]:
    """All of ours that a recipe may hold."""
    assert schema.Recipe
    known, left = [], [Section]
    while left:
        known.append(here := left.pop())
        left += [one for one in here.__subclasses__() if one.__module__.startswith("draftsmith.")]
    return known


def test_every_number_of_a_recipe_has_a_least_value():
    """A size of 0, or a share below it, must stop a run before anything is allocated."""
    count, without, rows = 0, set(), set()
    for section in sections():
        for name, field in section.model_fields.items():
            if {int, float} & {field.annotation, *typing.get_args(field.annotation)}:
                count += 1
                if not any(hasattr(limit, "ge") or hasattr(limit, "gt") for limit in field.metadata):
                    without.add(name)
                elif name.endswith("batch_size"):
                    rows.add(next(limit.ge for limit in field.metadata if hasattr(limit, "ge")))
    assert without == _OTHERWISE and count > 350
    assert rows == {1}
