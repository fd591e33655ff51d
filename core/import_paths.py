"""`kind: my_package.hydra:HydraConfig`: sections of other packages, wherever a recipe takes one of ours by its kind.

To import a module runs its code, so that is for who wrote the recipe to ask for: validation imports with `ALLOW_IMPORT`
as its context alone. Without it, as where a published folder's manifest is read, a module must be imported already.
"""

from __future__ import annotations

import hashlib
import importlib
import operator
import pkgutil
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_origin

from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationInfo, model_validator
from pydantic_core import core_schema

from .errors import Refused, UserError, did_you_mean, first_line
from .json_types import object_at, text_at, walk
from .section import Section, is_class, written_kind

# Context of pydantic's validation: modules that kinds name may be imported.
ALLOW_IMPORT = {"allow_import": True}
_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_PATH = re.compile(f"({_NAME}):({_NAME})")
# Files of a package that its results depend on: Python, compiled or built when it is imported, settings beside them.
_CODE = {".py", ".pyx", ".so", ".pyd", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".json", ".toml", ".yaml", ".yml"}
OUTSIDE = re.compile(rf".*:|{_NAME}\.[A-Z]\w*$")  # a kind that is meant for a class of another package


class NotImported(UserError):
    """A section is of a module that is not imported, and nobody has allowed to import it."""


class Kinded(Section):
    """A section that its `kind` tells apart. Ours declare a word, as a `Literal`; the class of another package leaves
    the key as it is here, and its kind is its import path.
    """

    # Which section this is: a word, or MODULE:CLASS of another package.
    kind: str

    @property
    def base_kind(self) -> str:
        """The kind; of a class of another package that derives from one of ours, that one's kind. Where ours has
        several, theirs says which: `base_kind: ClassVar[str] = "llava"`.
        """
        words = () if _declares_a_word(type(self)) else _words(type(self))
        return words[0] if words else self.kind

    @model_validator(mode="before")
    @classmethod
    def _kind_of_its_own(cls, values: object) -> object:
        given = object_at(values)
        if given is None or _declares_a_word(cls):
            return values
        words, base = _words(cls), None if isinstance(cls.base_kind, property) else cls.base_kind
        if base not in words if base is not None else len(words) > 1:
            raise Refused("kind", f"{cls.__name__} does not say which of {', '.join(words) or 'no kinds'} it is",
                          'write base_kind: ClassVar[str] = "..." in the class')  # fmt: skip
        import_path = f"{cls.__module__}:{cls.__qualname__}"
        kind = given.get("kind", import_path)
        # Another path to the same class (`my_package:HydraConfig`) stays as it is written.
        if isinstance(kind, str) and kind != import_path and loaded(kind) is not cls:
            raise Refused("kind", f"{kind!r} is not this class", f"write {import_path}, or leave it out")
        return {**given, "kind": kind}


class OrImported:
    """Metadata of a union of sections: also takes any subclass of `bases` by its import path."""

    def __init__(self, *bases: type[Kinded]):
        self.bases = bases

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> object:
        # What is written out is the section that is there, which the union may not know.
        as_it_is = core_schema.simple_ser_schema("any")  # type: ignore[arg-type]
        return core_schema.with_info_wrap_validator_function(self._read, handler(source), serialization=as_it_is)

    def _read(self, value: Any, shipped: Any, info: ValidationInfo) -> Any:
        kind = written_kind(value) or ""
        if not OUTSIDE.match(kind):
            return shipped(value)
        section = imported(kind, self.bases, allowed=bool((info.context or {}).get("allow_import")))
        return TypeAdapter(section).validate_python(value, context=info.context)


def imported(path: str, bases: tuple[type[Kinded], ...], *, allowed: bool) -> type[Kinded]:
    """The class at `path` (MODULE:CLASS).

    Args:
        allowed: its module may be imported; else it must be already.

    Raises:
        NotImported: it is not, and must not be.
        Refused: there is no such class, or it is no section of this kind.
    """
    if not (match := _PATH.fullmatch(path)):
        meant = ":".join(path.rsplit(".", 1)) if ":" not in path else "MODULE:CLASS, as in my_package.hydra:HydraConfig"
        raise Refused("kind", f"{path!r} is no import path", f"write {meant}")
    name, attribute = match.groups()
    if name not in sys.modules and not allowed:
        raise NotImported(
            f"kind {path} is code of another package, and {name} is not imported", where=f"kind {path}",
            hint=f"if you trust that package, import {name} first or pass allow_import=True "
            "(commands: --allow-import; recipes: allow_import=true)",
        )  # fmt: skip
    expected = " or ".join(base.__name__ for base in bases)
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever the module's own code raises
        package, _, last = name.rpartition(".")
        hint = f"python -c 'import {name}' shows all of it; pip install -e FOLDER installs its package"
        if isinstance(error, ModuleNotFoundError) and (folders := loaded(f"{package}:__path__")):
            hint = f"{did_you_mean(last, [one.name for one in pkgutil.iter_modules(folders)])} {hint}"
        problem = f"importing {name} fails: {type(error).__name__}: {first_line(error)}"
        raise Refused("kind", problem, hint) from error
    try:
        section: Any = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        known = [name for name, value in vars(module).items() if is_class(value, *bases)]
        raise Refused("kind", f"{name} has no {attribute}", did_you_mean(attribute, known)) from error
    if not is_class(section, *bases):
        raise Refused("kind", f"{path} is no {expected}", f"derive the class from {expected}")
    if _declares_a_word(section):
        problem = f"{path} has the kind {', '.join(map(repr, _words(section)))} of its own"
        raise Refused("kind", problem, "write that, or `kind: str` in the class of another package")
    return section


def _declares_a_word(section: type[Kinded]) -> bool:
    return get_origin(section.model_fields["kind"].annotation) is Literal


def _words(section: type[Kinded]) -> tuple[str, ...]:
    """The kinds of the section of ours that a class is, or derives from."""
    ours = (base for base in section.__mro__ if issubclass(base, Kinded) and _declares_a_word(base))
    return next((base.model_fields["kind"].annotation.__args__ for base in ours), ())  # type: ignore[union-attr]


def loaded(path: str) -> Any:
    """What is at an import path; None: nothing, or its module is not imported."""
    name, _, attribute = path.partition(":")
    return getattr(sys.modules.get(name), attribute, None)


def kinds_within(section: object) -> Iterator[str]:
    """Import paths among the kinds of a section and those inside it, as a recipe's tree has them."""
    for _, part in walk(section):
        if _PATH.fullmatch(kind := text_at(part, "kind") or ""):
            yield kind


def code_of(path: str) -> dict[str, str]:
    """Which code an import path stands for, for the record: its package's version and the hash of all of the package's
    files of code, by name and content, where known. A module outside of any package is one file.
    """
    name = path.partition(":")[0]
    top = name.partition(".")[0]
    code = {}
    if packages := metadata.packages_distributions().get(top):
        code["package"] = f"{packages[0]} {metadata.version(packages[0])}"
    folders = [Path(place) for place in loaded(f"{top}:__path__") or ()]
    files = {file.relative_to(folder).as_posix(): file for folder in folders for file in folder.rglob("*")
             if file.suffix in _CODE and file.is_file() and "__pycache__" not in file.parts}  # fmt: skip
    if not files and (alone := Path(loaded(f"{name}:__file__") or "")).is_file():
        files = {alone.name: alone}
    if files:
        # Runs compare it with what they began with: another way of hashing would stop those.
        digest = hashlib.sha256()
        for place, file in sorted(files.items()):
            digest.update(f"{place}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
        code["sha256"] = digest.hexdigest()
    return code
