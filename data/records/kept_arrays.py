"""Arrays that are kept beside a run, so that the next start need not compute them.

The container is numpy's `.npz`, a zip, whose CRC-32 finds every flipped byte.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...core.files import write_whole
from ...core.ranks import notice

# What reading a zip that is cut, edited or none raises, and an array that would be unpickled.
_DAMAGED = (zipfile.BadZipFile, ValueError, EOFError, KeyError, TypeError, RuntimeError, OSError)


def read_arrays(path: Path, kinds: Mapping[str, type[np.generic]]) -> dict[str, np.ndarray] | None:
    """The arrays that `write_arrays` kept, by name and dtype; None: none are there, or damaged ones, which is said."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in kinds}
        for name, kind in kinds.items():
            if not np.issubdtype(arrays[name].dtype, kind):
                raise ValueError(f"{name} is of {arrays[name].dtype}")
    except _DAMAGED as error:
        notice(f"{path} is damaged and is made again ({error or type(error).__name__})")
        return None
    return arrays


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Keep the arrays under their names. Raises `UserError` where the disk is full."""
    items: dict[str, Any] = dict(arrays)
    np.savez(content := io.BytesIO(), **items)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content.getvalue())
