"""Sections of recipes refuse what cannot be meant."""

import typing

from draftsmith.core.section import Section, parts, within, written_kind
from draftsmith.recipes.config import schema
from pydantic import Field

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


class Leaf(Section):
    size: int = 1
    inner: list["Leaf"] = Field([])


class Branch(Section):
    kind: str = "branch"
    from_stage: Leaf | None = Field(None, alias="from")
    leaves: dict[str, Leaf] = Field({})
    pairs: tuple[Leaf, ...] = ()


def test_sections_are_found_under_the_keys_of_recipes_and_not_inside_one_another():
    branch = Branch.model_validate({"from": {"size": 2}, "leaves": {"a": {"inner": [{}]}}, "pairs": [{"size": 3}]})
    found = {".".join(place): leaf.size for place, leaf in within({"stages": [branch]}, Leaf)}
    assert found == {"stages.0.from": 2, "stages.0.leaves.a": 1, "stages.0.pairs.0": 3}
    assert [key for key, _ in parts(branch)] == ["kind", "from", "leaves", "pairs"]


def test_a_kind_is_read_from_a_section_and_from_its_tree():
    assert written_kind(Branch()) == written_kind({"kind": "branch"}) == "branch"
    assert written_kind({"kind": 3}) is written_kind(Leaf()) is written_kind("branch") is None
