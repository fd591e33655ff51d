"""The files of a folder of shards: names, what is said of one shard, and writing that is whole or not there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import read_json

FORMAT = 2  # of shards, their json and the manifest: count up when one changes
AGAIN = "delete the file and run the stage again: it writes the missing shard only"


@dataclass(frozen=True)
class Shard:
    """What a manifest says of one shard."""

    index: int
    sha256: str  # of the tar
    num_samples: int
    bytes: int  # of the tar
    refused: dict[str, int]  # reason -> items that were left out
    sidecar_sha256: str  # of the json beside the tar


def tar_path(folder: Path, index: int) -> Path:
    """Path of shard number `index`."""
    return folder / f"shard-{index:06d}.tar"


def read_shard(folder: Path, index: int) -> Shard:
    """What the JSON file beside a shard says of it. Raises `UserError` where the file is missing or damaged."""
    path = tar_path(folder, index).with_suffix(".json")
    summary = read_json(path, cure=AGAIN)
    try:
        fields = {name: summary[name] for name in ("sha256", "num_samples", "bytes", "refused")}
    except (KeyError, TypeError) as error:
        raise edited(path, f"no {error}") from error
    return Shard(index, **fields, sidecar_sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def dump(value: Any) -> bytes:
    """The value as JSON bytes; values that are not finite are refused."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def edited(path: Path, problem: str) -> UserError:
    """The error to raise where a shard is not as it was written."""
    return UserError(f"edited or damaged shard: {problem}", where=str(path), cure=AGAIN)


def difference(held: Any, wanted: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first field in which two JSON values differ, dotted, with both values."""
    if not (isinstance(held, dict) and isinstance(wanted, dict)):
        return None if held == wanted else (name, held, wanted)
    for key in [*wanted, *(k for k in held if k not in wanted)]:
        if (found := difference(held.get(key), wanted.get(key), f"{name}.{key}" if name else key)) is not None:
            return found
    return None
