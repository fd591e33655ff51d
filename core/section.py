"""Base of every config class: a recipe section that is checked before anything is allocated.

Each section lives beside the code that reads it. Unknown keys, wrong types and values out of range
are refused by pydantic; `recipes/messages.py` turns its report into one readable message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError, core_schema

from . import json_types
from .errors import did_you_mean
from .json_types import text_at

if TYPE_CHECKING:
    import torch
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

S = TypeVar("S", bound="Section")

# No setting counts further; what is larger is a slip, and some of what reads it (NumPy, torch) counts in 64 bits.
MOST = 10**15

# Context of `model_dump` for fingerprints: sections may leave out what changes no result.
FINGERPRINT = {"fingerprint": True}


def _number(value: Any) -> Any:
    """Refuses what pydantic would count as 0 or 1, and whole numbers as large as a float can name them."""
    match value:
        case bool():
            raise PydanticCustomError("number_type", "should be a number")
        case float() if abs(value) > MOST and value.is_integer():
            return int(value)  # beyond 64 bits, where pydantic speaks of a parser
    return value


def _with_real_numbers(schema: Any, cls: type[BaseModel]) -> Any:
    """pydantic's schema of `cls` with `_number` before each number, and a bound on whole ones that have none.

    Sections inside have been through this themselves.
    """
    kind = schema["type"]
    if kind == "model" and schema["cls"] is not cls:
        return schema
    if kind == "function-before" and schema["function"]["function"] is _number:
        return schema
    if kind == "int":
        limits = {} if {"le", "lt"} & schema.keys() else {"le": MOST}
        limits |= {} if {"ge", "gt"} & schema.keys() else {"ge": -MOST}
        return core_schema.no_info_before_validator_function(_number, {**schema, **limits})
    if kind == "float" or (kind == "literal" and any(type(value) is int for value in schema["expected"])):
        return core_schema.no_info_before_validator_function(_number, schema)
    inner = dict(schema)
    for key in ("schema", "items_schema", "keys_schema", "values_schema"):
        match inner.get(key):
            case dict(item):
                inner[key] = _with_real_numbers(item, cls)
            case list(items):
                inner[key] = [_with_real_numbers(item, cls) for item in items]
    if kind == "union":
        inner["choices"] = [_choice(choice, cls) for choice in inner["choices"]]
    elif kind == "model-fields":
        inner["fields"] = {name: _with_real_numbers(field, cls) for name, field in inner["fields"].items()}
    return inner


def _choice(choice: Any, cls: type[BaseModel]) -> Any:
    """One of a union's choices under the label that pydantic would have given it: messages name it by that."""
    schema, label = choice if isinstance(choice, tuple) else (choice, None)
    changed = _with_real_numbers(schema, cls)
    if label is None and changed is not schema and schema["type"] in ("int", "float"):
        label = schema["type"]
    return changed if label is None else (changed, label)


class _Told(ModelMetaclass):
    """Adds a note on what was meant to pydantic's error for an unknown setting, in sections that Python code makes."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        try:
            return super().__call__(*args, **settings)
        except ValidationError as error:
            section: Any = cls
            known = [field.alias or name for name, field in section.model_fields.items()]
            for problem in error.errors(include_url=False, include_context=False):
                if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
                    name = str(problem["loc"][0])
                    error.add_note(f"{name}: {did_you_mean(name, known)}")
            raise


class Section(BaseModel, metaclass=_Told):
    """A frozen part of a recipe; unknown keys are errors.

    Numbers are finite, and true and false are no numbers. Numbers as text are read, since that is what an environment
    variable (`${oc.env:STEPS}`) gives, and so are whole floats (`steps: 1e3`).
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=False, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        # A class that is complete, inside another or in a union, has been through this.
        return handler(source) if cls.__pydantic_complete__ else _with_real_numbers(handler(source), cls)


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


def written_kind(section: object) -> str | None:
    """The kind that a section, or a tree that one is read from, says; None: it says none, or no text."""
    return text_at(dict(section) if isinstance(section, Section) else section, "kind")


def torch_dtype(name: str) -> torch.dtype:
    """Converts the value of a `dtype` key to a torch dtype: bfloat16 -> `torch.bfloat16`."""
    import torch

    return getattr(torch, name)
