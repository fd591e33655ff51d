"""The one reader of picture files, for all tracks: it opens, checks and converts to RGB.

What a file is called says nothing about it: the format is told by its content, and only formats of a list are read.
Sizes are checked in the file's head, before a pixel is decoded. Of animations and of TIFFs with several pages the first
picture counts. Pictures are turned as their orientation tag (EXIF) says, as transformers, `datasets` and browsers do;
alpha is dropped, as by the official recipes' `convert("RGB")`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from ...core.errors import first_line
from ...core.file_kinds import HEAD, other_kind
from .media_files import BadMedia, MediaFile, open_media
from .tiles import Size

# Others run programs (EPS), or have never been looked at.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Endings of such files in tars and folders, without the dot. The content decides which format a file has.
SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm", "pfm", "jfif", "jpe",
            "apng")  # fmt: skip
MAX_BYTES = 1 << 30  # of a file
MAX_PIXELS = 178_956_970  # of a picture: Pillow's own limit, from which on it takes one for a decompression bomb
# Of what an image processor of transformers is given, a picture or the square around it: 8,192 x 8,192 pixels. It holds
# 14 bytes of each, so that one picture takes 0.9 GB at most, in each of the loader's workers. The largest pictures of
# data sets for these models are 8K (7,680 x 4,320), photographs of phones (up to 64 million pixels) and pages of A4 at
# 600 dpi (4,960 x 7,016): the squares around the first and the last fit.
MAX_CANVAS = 1 << 26

# Text and colour profile of a PNG, which renderers and image generators write by the megabyte; Pillow stops at 1 MiB.
MAX_METADATA = PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 1 << 26

_Read = TypeVar("_Read")
_PHOTOMETRIC, _BITS_PER_SAMPLE, _WHITE_IS_ZERO = 262, 258, 0  # tags of TIFF, and a value of the first


def load_image(file: MediaFile, *, check: Callable[[Size], None] | None = None) -> Image.Image:
    """The picture as RGB, upright. Raises `BadMedia` that names the file: missing, no regular file, of no known format,
    broken, too large, or of a size (width, height) that `check` refuses before anything is decoded.
    """

    def decode(image: Image.Image) -> Image.Image:
        turn = _turn(image)  # of the head: decoding may change what Pillow says of it
        if check is not None:
            check(_turned_size(image.size, turn))
        rgb = as_rgb(image)
        return rgb if turn is None else rgb.transpose(turn)

    return _read(file, decode)


def image_size(file: MediaFile) -> Size:
    """Width and height as `load_image` gives them, from the file's head. Raises as that."""
    return _read(file, lambda image: _turned_size(image.size, _turn(image)))


def mime_type(file: MediaFile) -> str:
    """The MIME type of its content, such as image/png. Raises as `load_image`."""
    return _read(file, lambda image: Image.MIME[str(image.format)])


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
_SIDES_SWAPPED = (_TURNS[5], _TURNS[6], _TURNS[7], _TURNS[8])
_ORIENTATION = 0x0112


def _turn(image: Image.Image) -> Image.Transpose | None:
    """The turn by its orientation tag; None: none, or none that can be read. Pillow turns TIFFs itself."""
    if image.format == "TIFF":
        return None
    try:
        # Not a PNG's own method, which would decode all of it to look for a tag behind its pixels.
        with warnings.catch_warnings(action="ignore"):
            return _TURNS.get(Image.Image.getexif(image).get(_ORIENTATION, 1))
    # A damaged tag takes nothing from a picture that can be decoded; Pillow's parser raises many kinds of exceptions.
    except Exception:
        return None


def _turned_size(size: Size, turn: Image.Transpose | None) -> Size:
    return (size[1], size[0]) if turn in _SIDES_SWAPPED else size


def _read(file: MediaFile, use: Callable[[Image.Image], _Read]) -> _Read:
    """The result of `use` on the opened picture. Every failure of a stranger's file ends in a `BadMedia`."""
    try:
        with open_media(file, "image") as data:
            if data.seek(0, os.SEEK_END) > MAX_BYTES:
                raise BadMedia(f"an image file of more than {MAX_BYTES:,} bytes", reason="file too large")
            data.seek(0)
            head = data.read(HEAD)
            data.seek(0)
            with Image.open(data, formats=FORMATS) as image:
                check_area(image.size, MAX_PIXELS)
                return use(image)
    except BadMedia as error:
        where = error.where or str(file)
        raise BadMedia(error.problem, reason=error.reason, where=where, hint=error.hint or _REPLACE) from error
    except MemoryError as error:
        raise BadMedia("not enough memory for the image", reason="too many pixels", where=str(file),
                       hint="shrink the picture, or use fewer workers") from error  # fmt: skip
    # Pillow's parsers raise many kinds of exceptions for damaged bytes (SyntaxError, struct.error, zlib.error, ...).
    except Exception as error:
        is_bomb = isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning)
        problem, reason = first_line(error), "too many pixels" if is_bomb else "unreadable image"
        if isinstance(error, UnidentifiedImageError):  # its own text names an address in memory
            kind = other_kind(head)
            problem = f"{kind[0] if kind else 'damaged in its head'}, or none of {', '.join(FORMATS)}"
        if "MAX_TEXT_" in problem:
            problem, hint = f"a PNG with over {MAX_METADATA:,} bytes of text or colour profile", "write it without them"
            raise BadMedia(problem, reason="too much metadata", where=str(file), hint=hint) from error
        raise BadMedia(f"corrupt image: {problem}", reason=reason, where=str(file), hint=_REPLACE) from error


_REPLACE = "replace or remove the file"


def check_area(size: Size, limit: int, what: str = "the image has") -> None:
    """Raises `BadMedia` where `size` (width, height) has more than `limit` pixels."""
    width, height = size
    if width * height > limit:
        raise BadMedia(f"too many pixels: {what} {width:,} x {height:,}, and {limit:,} is the limit",
                       reason="too many pixels", hint="shrink, cut or remove the picture")  # fmt: skip


def as_rgb(image: Image.Image) -> Image.Image:
    """RGB of 8 bits. Alpha is dropped, and of grey values of more than 8 bits the upper 8 stay.

    - Of 16 bits (and PGM files of more than 8): the upper byte, as Pillow reads 16-bit colour.
    - Integers of 32 bits: by the largest value, of 8 bits up to 255, else of 16.
    - Floats: by the largest value, 0 (black) to 1 (white), else 0 to 255.

    Raises:
        BadMedia: integers or floats beyond that.
    """
    if image.mode.startswith("I;16"):
        bits = _tag(image, _BITS_PER_SAMPLE)  # some TIFFs use 12
        return _grey(np.asarray(image) >> ((16 if bits is None else int(bits[0])) - 8), image)
    if image.mode not in ("I", "F"):
        return image.convert("RGB")
    values = np.asarray(image)
    least, most = values.min(), values.max()
    if image.mode == "I":
        if least < 0 or most > 0xFFFF:
            raise _out_of_range(f"integers from {least:,} to {most:,}", "0 to 255, or 0 to 65,535")
        # PGM files of more than 8 bits are read as 16 bits whatever their largest value.
        return _grey(values if most <= 255 and image.format != "PPM" else values >> 8, image)
    if not (least >= 0 and most <= 255):  # not-a-number is no more
        raise _out_of_range(f"floats from {least:g} to {most:g}", "0 to 1, or 0 to 255")
    return _grey(np.floor(values * 255 + 0.5) if most <= 1 else values, image)


def _grey(values: np.ndarray, image: Image.Image) -> Image.Image:
    values = values.astype(np.uint8)
    if _tag(image, _PHOTOMETRIC) == _WHITE_IS_ZERO:  # Pillow turns those of 8 bits alone
        values = 255 - values
    return Image.fromarray(values).convert("RGB")


def _out_of_range(values: str, expected: str) -> BadMedia:
    return BadMedia(f"a grey image of {values}; expected {expected}", reason="unreadable image",
                    hint="convert the picture to 8 bits")  # fmt: skip


def _tag(image: Image.Image, number: int) -> Any:
    """A tag of a TIFF; None: it has none, or is no TIFF."""
    if image.format != "TIFF":
        return None
    tags: Any = image
    return tags.tag_v2.get(number)
