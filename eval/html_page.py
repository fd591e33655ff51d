"""A page of tables and pictures as one HTML file: pictures inside, tables that sort, nothing fetched from elsewhere.

`page.html.jinja` has its tags, style and script. Every text is escaped there: names come from recipes and reports,
which may be a stranger's.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from PIL import Image

from ..core.secrets import HIDDEN, redact
from ..core.templates import filled
from .tables import Figure, Part, PictureGrid

_PICTURE = "data:image/png;base64,"
# Of one group: `split` gives text and pictures. Text has no raw quotation mark, so none of it passes for a picture.
_PICTURES = re.compile(rf'(?<= src=")({re.escape(_PICTURE)}[A-Za-z0-9+/=]*)(?=")')


def html_page(title: str, parts: Sequence[Part], folder: Path) -> str:
    """The whole document, without secrets.

    Args:
        parts: paragraphs, lists, tables, figures and sections in their order.
        folder: where the figures' PNG files lie.
    """

    def picture(figure: Figure) -> str:
        return _inside((folder / figure.path).read_bytes())

    def pictures(grid: PictureGrid) -> list[list[str]]:
        """Each picture of a sheet, row by row."""
        with Image.open(folder / grid.path) as sheet:
            return [
                [_inside(_png(sheet.crop(grid.box(row, column, sheet.size)))) for column in range(len(grid.columns))]
                for row in range(len(grid.rows))
            ]

    template = Path(__file__).parent / "page.html.jinja"
    page = filled(template, picture, pictures, inline, title=title, parts=parts, zip=zip)
    return outside_pictures(page, lambda text: redact(text).replace(HIDDEN, escape(HIDDEN)))


def outside_pictures(page: str, change: Callable[[str], str]) -> str:
    """A page whose text was changed: what looks like a key or a path inside a picture's data is neither."""
    pieces = _PICTURES.split(page)
    return "".join(piece if number % 2 else change(piece) for number, piece in enumerate(pieces))


def taken_apart(page: str) -> tuple[str, list[bytes]]:
    """A page without its pictures, and their PNG files."""
    texts, pictures = list[str](), list[bytes]()
    for number, piece in enumerate(_PICTURES.split(page)):
        try:
            pictures += [base64.b64decode(piece.removeprefix(_PICTURE))] if number % 2 else []
        except binascii.Error:  # somebody else's page: text to look through
            texts.append(piece)
        texts += [] if number % 2 else [piece]
    return "".join(texts), pictures


def inline(text: str) -> str:
    """A text in which reports mark words as Markdown does: **bold** and `code`."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(text)))


def _inside(png: bytes) -> str:
    return _PICTURE + base64.b64encode(png).decode()


def _png(picture: Image.Image) -> bytes:
    written = io.BytesIO()
    picture.save(written, "PNG", optimize=True)
    return written.getvalue()
