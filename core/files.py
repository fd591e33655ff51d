"""Small files and folders that are written whole or not at all, and JSON files whose errors name the file."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UserError


def read_json(path: Path, *, hint: str) -> Any:
    """What a JSON file holds. Raises `UserError` where it is missing or cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError("file not found", where=str(path), hint=hint) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON: {error}", where=str(path), hint=hint) from error


def write_whole(path: Path, data: bytes) -> None:
    """Write aside, flush to the disk, rename: nobody meets half a file. Ranks may write the same at once.

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
    """The error to raise where a file cannot be written."""
    hint = "make room, and run the stage again: it goes on behind the shards that it finished"
    return UserError(f"cannot be written: {error.strerror or error}", where=str(path), hint=hint)


def check_new(destination: Path) -> None:
    """Raises `UserError` where the destination exists."""
    if destination.exists():
        raise UserError("the destination exists", where=str(destination), hint="name another, or remove it first")


@contextmanager
def new_folder(destination: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder beside the destination to write to; it becomes the destination once everything is written.

    Args:
        replace: it takes the place of a destination that exists.

    Raises:
        UserError: the destination exists, and is not to be replaced.
    """
    if not replace:
        check_new(destination)
    aside = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if replace:
            shutil.rmtree(destination, ignore_errors=True)
        check_new(destination)  # somebody may have been quicker
        os.replace(aside, destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
