"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError


def check_new(destination: Path) -> None:
    """Raises `UserError` where the destination exists."""
    if destination.exists():
        raise UserError("the destination exists", where=str(destination), cure="name another, or remove it first")


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A folder beside the destination to write to; it becomes the destination once everything is written.

    Raises:
        UserError: the destination exists.
    """
    check_new(destination)
    aside = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        check_new(destination)  # somebody may have been quicker
        os.replace(aside, destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
