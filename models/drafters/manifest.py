"""`draftsmith.json` beside weights: what they are, and which target they are for. Here it is read, for all drafters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...core.files import checked, read_json
from ...core.json_types import JsonObject

MANIFEST = "draftsmith.json"
_CURE = "restore the file, or train the drafter again"


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


def read_manifest(folder: Path) -> JsonObject:
    """What the manifest in a folder says; {} where there is none.

    Raises:
        UserError: it cannot be read, or an entry is of another kind than we write.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    written = read_json(path, JsonObject, hint=_CURE, once=True)
    checked(written, _Kinds, where=str(path), hint=_CURE)
    return written
