"""Sections of a schema for error messages: their kinds, their keys, and the section at a key."""

from __future__ import annotations

import re
from typing import get_args, get_origin

from ..core.import_paths import loaded
from ..core.section import Section, is_class

# What pydantic puts into a place where a key takes a word or a section.
_PLAIN = r"(?:str|int|float)"
_CHECKED = rf"function-\w+\[\w+\(\), ?{_PLAIN}\]"  # text that a function looks at
WORD = re.compile(rf"{_PLAIN}|list(\[.*)?|literal\[.*|{_CHECKED}")
SECTION = re.compile(rf"(?!{_CHECKED}$)(tagged-union|function-\w+|dict)\[.*")


def sections(annotation: object) -> list[type[Section]]:
    """The section classes inside an annotation."""
    if is_class(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections(part)]


def kinds(section: type[Section]) -> tuple[str, ...]:
    """The kinds that a section is told by; none where it has no `kind`."""
    kind = section.model_fields.get("kind")
    return get_args(kind.annotation) if kind else ()


def names(section: type[Section]) -> set[str]:
    """Its keys as recipes write them."""
    return {field.alias or name for name, field in section.model_fields.items()}


def walk(fields: dict[str, object], places: list[str]) -> tuple[list[str], list[type[Section]]]:
    """Follow pydantic's place in a schema: the keys that the user wrote, and the sections reached.

    Tagged unions put the kind into the place, and a mapping's keys (stage names) are no field.

    Args:
        fields: key -> annotation at the top.
    """
    kept, models = places[:1], sections(fields.get(places[0])) if places else []
    free_name = bool(places) and get_origin(fields.get(places[0])) is dict
    for place in places[1:]:
        if free_name:
            kept.append(place)
            free_name = False
            continue
        if (WORD.fullmatch(place) or SECTION.fullmatch(place)) and not any(place in names(m) for m in models):
            continue
        if any(place == m.__name__ for m in models):  # a key that takes a word or a section of one kind
            continue
        # Its kind, and of a `train` stage what it trains on.
        tagged = [m for m in models if place in (*kinds(m), getattr(m, "way", ""))]
        if ":" in place and is_class(outside := loaded(place), Section):
            tagged = [outside]
        # Of several models one is chosen before any key of it is read.
        if tagged and (len(models) > 1 or place not in names(models[0])):
            models = tagged
            continue
        kept.append(place)
        matching = [f for m in models for n, f in m.model_fields.items() if place in (n, f.alias)]
        free_name = any(get_origin(f.annotation) is dict for f in matching)
        models = [inner for f in matching for inner in sections(f.annotation)] or models
    return kept, models
