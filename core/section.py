"""Base of every config class: a recipe section that is checked before anything is allocated.

Each section lives beside the code that reads it. pydantic refuses unknown keys, wrong types and values out of range;
`recipes/config/load.py` adds file and key to its report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator

from . import json_types
from .errors import Refused, did_you_mean, nearest
from .json_types import object_at, text_at

if TYPE_CHECKING:
    import torch

S = TypeVar("S", bound="Section")

# Context of `model_dump` for fingerprints: sections may leave out what changes no result.
FINGERPRINT = {"fingerprint": True}


class Section(BaseModel):
    """A frozen part of a recipe; unknown keys are errors.

    Numbers are finite, and true and false are no numbers. Numbers as text are read, since that is what an environment
    variable (`${oc.env:STEPS}`) gives, and so are whole floats (`steps: 1e3`).
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=False, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="wrap")
    @classmethod
    def _strictly(cls, values: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        """Names the nearest key of an unknown one, and refuses true and false where pydantic would count them."""
        fields = {field.alias or name: name for name, field in cls.model_fields.items()}
        try:
            section = check(values)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
            unknown = [str(p["loc"][0]) for p in problems if p["type"] == "extra_forbidden" and len(p["loc"]) == 1]
            if not unknown:
                raise
            # A mistyped key may be what makes others unknown.
            name = next((name for name in unknown if nearest(name, fields, likeness=0.8)), unknown[0])
            raise Refused(name, "unknown key", did_you_mean(name, fields)) from error
        given = object_at(values) or {}
        for key, name in fields.items():
            if _is_counted(given.get(key), getattr(section, name)):
                raise Refused(key, f"should be a number, and is {given[key]}")
        return section


def _is_counted(value: object, read: object) -> bool:
    """Whether a true or false, alone, in a list or under a name, was read as a number."""
    if isinstance(value, list) and isinstance(read, list | tuple):
        return any(map(_is_counted, value, read))
    if isinstance(value, dict) and isinstance(read, dict):
        return any(_is_counted(part, read.get(key)) for key, part in value.items())
    return isinstance(value, bool) and type(read) in (int, float)


def parts(value: object) -> Iterable[tuple[Any, Any]]:
    """(key or number, value) of what a section, a mapping or a list holds, keys as recipes write them."""
    if isinstance(value, Section):
        fields = type(value).model_fields
        return ((fields[name].alias or name, part) for name, part in value)
    return json_types.parts(value)


def within(value: object, kind: type[S], place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], S]]:
    """The sections of a kind inside a value, with the keys that lead to each; none of those inside another such one."""
    if isinstance(value, kind):
        yield place, value
        return
    for key, part in parts(value):
        yield from within(part, kind, (*place, str(key)))


def is_class(value: object, *bases: type[S]) -> TypeGuard[type[S]]:
    """Whether this is one of the classes of sections, or derives from one."""
    return isinstance(value, type) and issubclass(value, bases)


def sections(annotation: object) -> list[type[Section]]:
    """The section classes inside an annotation."""
    if is_class(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections(part)]


def kinds(section: type[Section]) -> tuple[str, ...]:
    """The kinds that a section is told by; none where it has no `kind`."""
    kind = section.model_fields.get("kind")
    return get_args(kind.annotation) if kind else ()


def written_kind(section: object) -> str | None:
    """The kind that a section, or a tree that one is read from, says; None: it says none, or no text."""
    return text_at(dict(section) if isinstance(section, Section) else section, "kind")


def torch_dtype(name: str) -> torch.dtype:
    """Converts the value of a `dtype` key to a torch dtype: bfloat16 -> `torch.bfloat16`."""
    import torch

    return getattr(torch, name)
