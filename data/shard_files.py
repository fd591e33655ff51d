"""The files of a folder of shards: names, what is said of one shard, and writing that is whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import UserError

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
    summary = read_json(path)
    try:
        fields = {name: summary[name] for name in ("sha256", "num_samples", "bytes", "refused")}
    except (KeyError, TypeError) as error:
        raise edited(path, f"no {error}") from error
    return Shard(index, **fields, sidecar_sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def dump(value: Any) -> bytes:
    """The value as JSON bytes; values that are not finite are refused."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """What a JSON file of a shard folder holds. Raises `UserError` where it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError("missing file", where=str(path), cure=AGAIN) from error
    except (ValueError, RecursionError) as error:
        raise edited(path, f"not valid JSON: {error}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Aside, to the disk, renamed: a reader or a crash never meets half a file. Ranks may write the same at once.

    Raises:
        UserError: the disk is full, or the folder is not ours.
    """
    # Ranks in containers of two nodes may have one process id.
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise unwritable(path, error) from error
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def unwritable(path: Path, error: OSError) -> UserError:
    """The error to raise where a shard cannot be written."""
    cure = "make room, and run the stage again: it goes on behind the shards that it finished"
    return UserError(f"cannot be written: {error.strerror or error}", where=str(path), cure=cure)


def edited(path: Path, problem: str) -> UserError:
    """The error to raise where a shard is not as it was written."""
    return UserError(f"edited or damaged shard: {problem}", where=str(path), cure=AGAIN)
