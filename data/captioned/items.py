"""One captioned picture, or why it cannot be used: its text and its pixels.

A reader raises `Unusable` for what concerns one item, and `UserError` for what concerns the whole source.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ...core.errors import encodable
from ...core.file_kinds import HEAD, other_kind
from ...core.files import NotRegular, open_regular
from ..pictures.media_files import BadMedia, Embedded
from ..pictures.picture_files import check_area, load_image
from ..pictures.tiles import Size

MAX_TEXT_BYTES = 1 << 20  # of a caption file or of a sample's json
MAX_PIXELS = 89_478_485  # half of what the reader of pictures allows: Pillow warns of a decompression bomb from here on


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


def caption_text(data: bytes) -> str:
    """A caption file's text."""
    try:
        return not_empty(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        kind = other_kind(data[:HEAD])
        raise Unusable("caption not UTF-8", kind[0] if kind else str(error)) from error


def not_empty(caption: str) -> str:
    """The caption without surrounding blanks. Raises `Unusable` where nothing is left, or half a character."""
    if encodable(caption) != caption:
        raise Unusable("caption not UTF-8", "half a character (a lone surrogate)")
    if not caption.strip():
        raise Unusable("empty caption", "nothing but blanks")
    return caption.strip()


def file_bytes(path: Path, max_bytes: int, missing: str = "missing image") -> bytes:
    """The whole file; one that is not there is refused for the reason `missing`."""
    try:
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError as error:
        raise Unusable(missing, f"no file {path.name}") from error
    except NotRegular as error:
        raise Unusable("not a plain file", f"{path.name} is {error}") from error
    except OSError as error:
        raise Unusable("unreadable file", f"{path.name}: {error.strerror}") from error
    if len(data) > max_bytes:
        raise Unusable("file too large", f"{path.name} has more than {max_bytes} bytes")
    return data


def decode_image(item: Captioned, size: int, *, min_side: int = 1) -> Image.Image | Refused:
    """The picture as RGB, size x size, cut by `center_crop`; or why not.

    Args:
        min_side: pictures whose shorter side has fewer pixels are refused.
    """

    def check(shown: Size) -> None:
        check_area(shown, MAX_PIXELS)
        short, long = sorted(shown)
        check_area((size, size * long // short), MAX_PIXELS, f"resized to a shorter side of {size}, it has")
        if short < min_side:
            raise BadMedia(f"{shown[0]} x {shown[1]}, min_side is {min_side}", reason="image too small")

    if not item.image:
        detail = "no bytes; the source reads captions only, or the file is empty"
        return Refused(item.number, item.key, "no image", item.where, detail)
    try:
        image = load_image(Embedded(item.where, lambda: io.BytesIO(item.image)), check=check)
    except BadMedia as error:
        return Refused(item.number, item.key, error.reason, item.where, error.problem)
    return center_crop(image, size)


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
