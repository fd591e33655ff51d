"""No file leaves with a secret in it: every file of a folder is read, what pictures and weights say beside their values
included.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ...core.errors import UserError
from ...core.secrets import secret_in
from ...data.pictures.embedded import Embedded
from ...data.pictures.media_files import MediaFile
from ...data.pictures.picture_files import image_notes
from ...eval.html_page import taken_apart

_STREAM = re.compile(rb"stream\r?\n(.*?)\r?\nendstream", re.DOTALL)
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".tif", ".tiff")


def refuse_secrets(folder: Path, token: str | None) -> None:
    """Raises `UserError`, with the file and the rule, where a file of the folder holds a secret: a token, a key, a
    password, or the value of a secret environment variable.

    Args:
        token: of the Hub's login.
    """
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        for part, text in (("its name", name), *_parts(path)):
            rule = "the Hub's token" if token is not None and token in text else secret_in(text)
            if rule is not None:
                raise UserError(
                    f"{name} holds a secret in {part} (rule: {rule}; its value is not shown)", where=str(path),
                    hint="the built folder is removed; find out which setting or file it came in by, take it out "
                    "there, and change the secret: it may have been read",
                )  # fmt: skip


def _parts(path: Path) -> Iterator[tuple[str, str]]:
    """(which part of the file, what it says)."""
    if path.suffix == ".safetensors":
        yield "its header", _header(path)
        return
    data = path.read_bytes()
    if path.suffix.lower() in _PICTURES:
        yield "its metadata", "\n".join(_metadata(path))
    if data.startswith(b"%PDF"):
        for stream in _STREAM.findall(data):
            yield "a stream", _inflated(stream).decode("latin-1")
    text = data.decode("utf-8", "replace")
    if path.suffix.lower() == ".html":
        text, pictures = taken_apart(text)  # base64 looks like many a key
        for picture in pictures:
            inside = Embedded(f"{path}, a picture", partial(BytesIO, picture))
            yield "a picture", "\n".join((picture.decode("utf-8", "replace"), *_metadata(inside)))
    yield "its text", text


def _header(path: Path) -> str:
    """Names and metadata of a file of weights."""
    try:
        with safe_open(path, "pt") as file:
            return json.dumps([file.metadata(), list(file.keys())], ensure_ascii=False)
    except SafetensorError as error:
        hint = "run the stage that wrote it again"
        raise UserError(f"unreadable weights: {error}", where=str(path), hint=hint) from error


def _metadata(path: MediaFile) -> Iterator[str]:
    """Comments, text chunks, EXIF and XMP of a picture."""
    for name, note in image_notes(path).items():
        yield f"{name}={note.decode('latin-1') if isinstance(note, bytes) else note}"


def _inflated(stream: bytes) -> bytes:
    try:
        return zlib.decompress(stream)
    except zlib.error:  # stored as it is, or by another filter
        return stream
