"""What all sources of captioned pictures share: their items, why some are refused, reading of files and of pictures.

A reader raises `Unusable` for what concerns one item, and `UserError` for what concerns the whole source.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import Field

from ...core.errors import UserError
from ...core.files import read_json
from ...core.section import Section

MAX_TEXT_BYTES = 1 << 20  # of a caption file or of a sample's json


Opener = Callable[[int], "Captioned | Refused"]  # number -> item; only then are picture and caption read


class Source(Section):
    """What every kind of source can be told, and does."""

    # Read the first so many items, refused ones included; null: all.
    max_samples: int | None = Field(None, ge=1)

    def openers(self, start: int) -> Iterator[Opener]:
        """One for each item from number `start` on, in a fixed order."""
        raise NotImplementedError

    def num_items(self) -> int:
        """All of them, before `max_samples`."""
        return sum(1 for _ in self.openers(0))


@dataclass(frozen=True)
class Captioned:
    """One picture, still encoded, with its caption."""

    number: int  # place in the source, refused items counted
    key: str  # the source's own name of it
    image: bytes  # empty where only captions are read
    caption: str
    label: int | None  # class index
    where: str  # file and place, for messages


@dataclass(frozen=True)
class Refused:
    """An item that cannot be used. `reason` is one of few, to be counted; `detail` is for the log."""

    number: int
    key: str
    reason: str
    where: str
    detail: str


class Unusable(Exception):
    """Carries `reason` and `detail` to where the item's number is known."""


def opened(
    number: int, key: str, where: str, content: Callable[[], tuple[bytes, str, int | None]]
) -> Captioned | Refused:
    """The item, with what `content` reads (picture, caption, label), or why it cannot be used."""
    try:
        image, caption, label = content()
    except Unusable as error:
        return Refused(number, key, error.args[0], where, error.args[1])
    return Captioned(number, key, image, caption, label, where)


def caption_text(data: bytes) -> str:
    """A caption file's text."""
    try:
        return not_empty(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Unusable("caption not UTF-8", str(error)) from error


def not_empty(caption: str) -> str:
    """The caption without surrounding blanks. Raises `Unusable` where nothing is left."""
    if not caption.strip():
        raise Unusable("empty caption", "nothing but blanks")
    return caption.strip()


def file_bytes(path: Path, max_bytes: int, missing: str = "missing image") -> bytes:
    """The whole file; one that is not there is refused for the reason `missing`."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError as error:
        raise Unusable(missing, f"no file {path.name}") from error
    except OSError as error:
        raise Unusable("unreadable file", f"{path.name}: {error.strerror}") from error
    if len(data) > max_bytes:
        raise Unusable("file too large", f"{path.name} has more than {max_bytes} bytes")
    return data


def existing_folder(folder: str) -> Path:
    """The folder as a path. Raises `UserError` where there is none."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError("folder not found", where=folder, hint="check the data section")
    return path


def json_file(path: Path) -> dict[str, Any]:
    """What a JSON file of any size holds. Raises `UserError` where it is missing, cannot be read, or is no object."""
    return read_json(path, dict[str, Any], hint="check the data section, or fetch the file again", max_bytes=None)


MAX_PIXELS = 89_478_485  # above it a picture is taken for a decompression bomb (Pillow's own limit)


def decode_image(item: Captioned, size: int, *, min_side: int = 1) -> Image.Image | Refused:
    """The picture as RGB, size x size, cut by `center_crop`; or why not.

    Args:
        min_side: pictures whose shorter side has fewer pixels are refused.
    """
    try:
        # The formats are listed because others run programs (EPS) or have never been looked at.
        with Image.open(io.BytesIO(item.image), formats=("JPEG", "PNG", "WEBP")) as image:
            short, long = sorted(image.size)
            # The second product is the area once the shorter side has been scaled to `size`.
            if short * long > MAX_PIXELS or size * size * long > MAX_PIXELS * short:
                raise Unusable("too many pixels", f"{image.width} x {image.height}")
            if short < min_side:
                raise Unusable("image too small", f"{image.width} x {image.height}, min_side is {min_side}")
            if image.mode[0] in "IF":
                raise Unusable("unreadable image", f"pixels of more than 8 bits (mode {image.mode})")
            return center_crop(image.convert("RGB"), size)
    except Unusable as error:
        reason, detail = error.args
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        reason, detail = "too many pixels", str(error)
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error) as error:
        reason, detail = (
            ("unreadable image", str(error))
            if item.image
            else ("no image", "no bytes; the source reads captions only, or the file is empty")
        )
    return Refused(item.number, item.key, reason, item.where, detail)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """ADM's crop (Dhariwal and Nichol 2021, as LlamaGen and LANTERN use it): the middle square as size x size pixels.

    Halve with a box filter while the shorter side is at least twice `size`, then scale it to `size` bicubically, so
    that small details neither alias nor blur.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))
