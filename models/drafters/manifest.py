"""`draftsmith.json` beside weights: what they are, and which target they are for.

A head reads the states of one model. With another model of the same width it loads without an error and drafts badly.
Published heads have no such file, and are taken as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...core.errors import UserError
from ...core.files import checked, read_json
from ...core.json_types import JsonMapping, JsonObject, object_at
from ..targets.table import IMAGE_SECTIONS

MANIFEST = "draftsmith.json"
_CURE = "restore the file, or train the drafter again"


class OtherTarget(UserError):
    """The name, the revision or the embedding of the target is another: of a base model of the same shape, perhaps."""


@dataclass(frozen=True)
class TargetIdentity:
    """Identity of the target, which a trained drafter is checked against when it is loaded."""

    section: JsonMapping  # of the recipe, in JSON types
    tokenizer_sha256: str | None = None


@dataclass(frozen=True)
class _Kinds:
    """The entries of a manifest that are read; all others are for the record only."""

    method: str | None = None
    drafter: JsonObject | None = None
    target: JsonObject | str | None = None
    settings: JsonObject | None = None
    reads: JsonObject | None = None
    imported: JsonObject | None = None
    tokenizer_hash: str | None = None
    tokenizer_sha256: str | None = None
    text_only: bool | None = None
    export: JsonObject | None = None


def tested_with() -> dict[str, str]:
    """Versions that a drafter was trained or converted with; a record, for whoever looks for a difference."""
    return {name: metadata.version(name) for name in ("torch", "transformers", "safetensors", "tokenizers")}


def manifest_for(kind: str, identity: TargetIdentity, **more: object) -> JsonObject:
    """The manifest of a drafter of this kind; `more` comes from the kind, and from the stage that trained it."""
    return {"method": kind, "target": dict(identity.section), "tested_with": tested_with(), **more}


def write_manifest(folder: Path, manifest: JsonMapping) -> None:
    """Write it into a folder."""
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))


def read_manifest(folder: Path) -> JsonObject:
    """The manifest in a folder; {} where there is none. Raises `UserError` where it cannot be read, or an
    entry is of another kind than we write.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    written = read_json(path, JsonObject, hint=_CURE, once=True)
    checked(written, _Kinds, where=str(path), hint=_CURE)
    return written


def refuse(
    name: str, value: object, expected: object, path: Path, error: type[UserError] = UserError, more: str = ""
) -> None:
    """Raise `error` for a drafter whose file says another value than the recipe; `more` is added to the hint."""
    how = "for another target" if name.startswith("target") else "otherwise"
    raise error(
        f"the drafter was made {how}: {name} is {value}, expected {expected}", where=str(path),
        hint=f"name the target and the settings that it was trained with, or train one for these{more}",
    )  # fmt: skip


def check_made_for(folder: Path, kind: str, identity: TargetIdentity | None, generator: Any = None) -> JsonObject:
    """Compare the manifest in a folder with a kind of drafter, a recipe's target (its name, revision and tokenizer;
    None: they are not compared) and a loaded image generator (its kind and shape), and return it; what it does not say
    is not compared. Raises `UserError` for a drafter of another kind or target, or a manifest that cannot be read.
    """
    path, written = folder / MANIFEST, read_manifest(folder)
    if written.get("method", kind) != kind:
        refuse("method", written["method"], kind, path)
    target = object_at(written, "target")
    named: Mapping[str, Any] = identity.section if identity else {}
    if target is None:
        target = {} if generator else {"path": written.get("target")}
    elif generator:
        _check_shape(target, named.get("kind", generator.kind), generator, path)
    other, name = target.get("path"), named.get("path")
    # A directory may have moved, and may be one of the Hub's models under another name.
    if other != name and not any(not one or Path(str(one)).is_dir() for one in (other, name)):
        more = "; if both names are of the same weights, fix target.path in this file"
        refuse("target.path", other, name, path, OtherTarget, more)
    revision, wanted = target.get("revision"), named.get("revision")
    if other == name and None not in (revision, wanted) and revision != wanted:
        refuse("target.revision", revision, wanted, path, OtherTarget)
    tokenizer, wanted = written.get("tokenizer_sha256"), identity and identity.tokenizer_sha256
    if None not in (tokenizer, wanted) and tokenizer != wanted:
        refuse("tokenizer_sha256", tokenizer, wanted, path)
    return written


def _check_shape(written: JsonObject, kind: str, generator: Any, path: Path) -> None:
    """Compare the kind and the shape of an image generator."""
    if written.get("kind") != kind:
        refuse("target.kind", written.get("kind"), kind, path)
    if (section := IMAGE_SECTIONS.get(kind)) is None:
        return
    try:
        shape = section.named_shape(written)
    except ValidationError as error:
        problem = f"target is no section of a recipe: {error.errors()[0]['msg']}"
        raise UserError(problem, where=str(path), hint="train the head again, or restore the file") from error
    for name, value in shape.items():
        if value != getattr(generator.config, name):
            refuse(f"target.{name}", value, getattr(generator.config, name), path)
