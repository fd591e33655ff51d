"""The files of pictures and clips that records name: where they may lie, and how they are opened.

Records come from strangers. A name stays inside the data section's folder, and what it leads to is a regular file: a
pipe would hang the reader, and a device has no end. What lies inside a record file (an Arrow table, a tar) is
`Embedded`: it is opened like a path, and its bytes are read only then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

from ...core.errors import UserError
from ...core.files import NotRegular, open_regular


@dataclass(frozen=True)
class Embedded:
    """Encoded bytes; `stream` opens them anew each time, and `where` names file and place in messages."""

    where: str
    stream: Callable[[], BinaryIO]

    def open(self, mode: str = "rb") -> BinaryIO:
        """The encoded bytes, as `Path.open("rb")` gives those of a file."""
        assert mode == "rb", mode
        return self.stream()

    def is_file(self) -> bool:
        """Whether the bytes are there: its record file holds them."""
        return True

    def __str__(self) -> str:
        return self.where


MediaFile = Path | Embedded
Medium = Literal["image", "clip"]


class BadMedia(UserError):
    """A picture or clip that cannot be used. `reason` is one of few, to be counted."""

    def __init__(self, problem: str, *, reason: str = "", where: str | None = None, hint: str | None = None):
        super().__init__(problem, where=where, hint=hint)
        self.reason = reason


def located(folder: Path, name: str | Embedded, *, allow_outside: bool) -> MediaFile:
    """A record's file, relative to `folder`. Symbolic links inside the folder are its owner's, and are followed.
    Raises `BadMedia` for a name that leads out of the folder, unless `allow_outside` takes it as it is.
    """
    if isinstance(name, Embedded):
        return name
    path = PurePosixPath(name)
    if not allow_outside and (path.is_absolute() or ".." in path.parts):
        raise BadMedia(
            f"{name!r} leads out of the folder of pictures" if ".." in path.parts else f"{name!r} is an absolute path",
            reason="outside the folder",
            where=str(folder),
            hint="name files relative to `images` (`videos`) of the data section and without `..`, or set "
            "allow_outside: true there if you trust whoever wrote the records",
        )
    return folder / name


def is_there(file: MediaFile) -> bool:
    """Whether there is a regular file. pathlib raises for names that no file can have, and records may have them."""
    return file.is_file() if isinstance(file, Embedded) else os.path.isfile(file)


def open_media(file: MediaFile, medium: Medium) -> BinaryIO:
    """The encoded bytes of a picture or clip. Raises `BadMedia` where there is no regular file to read."""
    if isinstance(file, Embedded):
        return file.open()
    folder = "images" if medium == "image" else "videos"
    try:
        return open_regular(file)
    except (OSError, ValueError) as error:
        match error:
            case FileNotFoundError() | NotADirectoryError():
                problem, reason = f"missing {medium}", f"missing {medium}"
                hint = f"check the `{folder}` folder of the data section"
            case NotRegular():
                problem, reason = f"not a regular file: {error}", "not a plain file"
                hint = "name a file, or remove the record"
            case OSError():
                problem, reason = f"the {medium} cannot be read: {error.strerror}", "unreadable file"
                hint = "check the file's permissions and its disk"
            case _:
                problem, reason, hint = f"not a file name: {error}", "unsafe name", "fix the record's path"
        raise BadMedia(problem, reason=reason, where=str(file), hint=hint) from error
