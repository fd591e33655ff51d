"""Whether a trained head was made for the target that it is loaded beside.

A head reads the states of one model. With another model of the same width it loads without an error and drafts badly.
Our heads say in `draftsmith.json` which target they were trained with; published ones have no such file, and are taken
as they are.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...core.errors import UserError
from ...core.json_types import JsonObject, object_at
from ..targets.table import IMAGE_SECTIONS
from .base import TargetIdentity
from .manifest import MANIFEST, read_manifest


class OtherTarget(UserError):
    """The name, the revision or the embedding of the target is another: of a base model of the same shape, perhaps."""


def tested_with() -> dict[str, str]:
    """Versions that a drafter was trained or converted with; a record, for whoever looks for a difference."""
    return {name: metadata.version(name) for name in ("torch", "transformers", "safetensors", "tokenizers")}


def image_head_manifest(drafter: JsonObject, identity: TargetIdentity, **training: object) -> JsonObject:
    """What `draftsmith.json` says of a head of an image generator.

    Args:
        drafter: its section.
    """
    return {
        "method": drafter["kind"],
        "drafter": drafter,
        "target": dict(identity.section),
        "tested_with": tested_with(),
        **training,
    }


def check_made_for(folder: Path, target: Any, identity: TargetIdentity | None) -> None:
    """Compare the manifest in a head's folder with a loaded image generator.

    Args:
        identity: the recipe's target, for its name and revision; None: only kind and shape are compared.

    Raises:
        UserError: the head was made for another target, or its manifest cannot be read.
    """
    path, written = folder / MANIFEST, object_at(read_manifest(folder), "target")
    if written is None:
        return
    expected: JsonObject = {"kind": target.kind if identity is None else identity.section.get("kind", target.kind)}
    actual: JsonObject = {"kind": written.get("kind")}
    if actual == expected and (section := IMAGE_SECTIONS.get(actual["kind"])) is not None:
        try:
            shape = section.named_shape(written)
        except ValidationError as error:
            problem = f"target is no section of a recipe: {error.errors()[0]['msg']}"
            raise UserError(problem, where=str(path), hint="train the head again, or restore the file") from error
        actual |= shape
        expected |= {name: getattr(target.config, name) for name in shape}
    if identity is not None:
        path_now, revision_now = identity.section.get("path"), identity.section.get("revision")
        # A directory may have moved, and may be one of the Hub's models under another name.
        if not any(name is None or Path(name).is_dir() for name in (written.get("path"), path_now)):
            actual["path"], expected["path"] = written.get("path"), path_now
        if written.get("path") == path_now and None not in (written.get("revision"), revision_now):
            actual["revision"], expected["revision"] = written.get("revision"), revision_now
    for name, value in expected.items():
        if actual[name] != value:
            hint = "name the target that the head was trained for, or train a head for this one"
            hint += "; if both names are of the same weights, fix target.path in this file" if name == "path" else ""
            problem = f"the head was made for another target: {name} is {actual[name]}, expected {value}"
            raise (OtherTarget if name in ("path", "revision") else UserError)(problem, where=str(path), hint=hint)
