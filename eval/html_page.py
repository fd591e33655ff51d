"""A page of tables and pictures as one HTML file: pictures inside, tables that sort, nothing fetched from elsewhere.

Every text is escaped: names come from recipes and reports, which may be a stranger's.
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
from .tables import Column, Figure, Items, Mark, Part, PictureGrid, Table, Value

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #59636e; --page: #fff; --line: #d8dee4; --mark: #0550ae;
        --soft: #f3f5f7 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e6ea; --faint: #9aa4af; --page: #14171b; --line: #363c44; --mark: #79b8ff; --soft: #1e2329 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
       color: var(--ink); background: var(--page); overflow-wrap: break-word }
h1 { font-size: 1.6rem; margin: 0 0 1rem } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem }
h3 { font-size: 1rem; margin: 1.5rem 0 .4rem } li { margin: .15rem 0 }
table { border-collapse: collapse; margin: .4rem 0 .8rem } .wide { overflow-x: auto }
th, td { padding: .28rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
thead th { vertical-align: bottom; border-bottom-width: 2px } tbody tr:hover td { background: var(--soft) }
tr > :first-child { position: sticky; left: 0; background: var(--page) }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td:not(.number) { min-width: 6.5rem }
td b { color: var(--mark) }
th button { font: inherit; font-weight: 600; border: 0; padding: 0; background: none; color: inherit;
            cursor: pointer; text-align: left }
th button:hover { color: var(--mark) } th[data-kind=number] button { text-align: right; width: 100% }
th button::after { content: " \\2195"; opacity: .35 } th[aria-sort] button::after { opacity: 1 }
th[aria-sort=ascending] button::after { content: " \\2191" }
th[aria-sort=descending] button::after { content: " \\2193" }
.note, figcaption { color: var(--faint); max-width: 60rem; font-size: .92em }
figure { margin: 1rem 0 } img { max-width: 100%; background: #fff; border-radius: 4px; display: block }
code { background: var(--soft); padding: 0 .25em; border-radius: 3px }
table.pictures th, table.pictures td { border: 0; padding: .2rem; font-weight: 400 }
table.pictures th { font-size: .85em; min-width: 6rem } table.pictures thead th { color: var(--faint) }
table.pictures tbody th { vertical-align: middle; padding-right: .8rem }
table.pictures img { width: 6rem; max-width: none; image-rendering: pixelated }
@media (max-width: 40rem) { body { margin: 1rem auto; font-size: 14px } th, td { padding: .25rem .45rem }
  tbody tr > :first-child { max-width: 9rem } }
"""
# Numbers by their value, the largest first; words by the alphabet; what was not measured stays last.
_SCRIPT = """
document.querySelectorAll("th button").forEach(button => button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0], place = head.cellIndex;
  const first = head.dataset.kind === "number" ? "descending" : "ascending";
  const other = first === "ascending" ? "descending" : "ascending";
  const order = head.getAttribute("aria-sort") === first ? other : first;
  head.parentNode.querySelectorAll("th").forEach(one => one.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", order);
  const value = row => row.cells[place].dataset.value ?? row.cells[place].textContent;
  const compare = (a, b) => head.dataset.kind === "number" ? a - b : a.localeCompare(b);
  [...body.rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    return (order === "ascending" ? 1 : -1) * compare(x, y);
  }).forEach(row => body.append(row));
}));
"""
_PICTURE = "data:image/png;base64,"
# Of one group: `split` gives text and pictures. Text has no raw quotation mark, so none of it passes for a picture.
_PICTURES = re.compile(rf'(?<= src=")({re.escape(_PICTURE)}[A-Za-z0-9+/=]*)(?=")')


def html_page(title: str, parts: Sequence[Part], folder: Path) -> str:
    """The whole document, without secrets.

    Args:
        parts: paragraphs, lists, tables, figures and sections in their order.
        folder: where the figures' PNG files lie.
    """
    body = "\n".join(_part(part, folder, 2) for part in parts)
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )
    return outside_pictures(page, _without_secrets)


def _without_secrets(text: str) -> str:
    return redact(text).replace(HIDDEN, escape(HIDDEN))


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


def _part(part: Part, folder: Path, level: int) -> str:
    if isinstance(part, str):
        return f"<p>{_words(part)}</p>"
    if isinstance(part, Items):
        entries = "\n".join(f"<li>{_words(entry)}</li>" for entry in part.entries)
        return f"<ul>\n{entries}\n</ul>" if entries else ""
    if isinstance(part, Table):
        return _table(part, level)
    if isinstance(part, Figure):
        return _figure(part, folder)
    content = "\n".join(_part(inner, folder, level + 1) for inner in part.content)
    return f"<section>\n<h{level}>{_words(part.title)}</h{level}>\n{content}\n</section>"


def _words(text: str) -> str:
    """A text in which reports mark words as Markdown does: **bold** and `code`."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(text)))


def _figure(figure: Figure, folder: Path) -> str:
    caption = escape(figure.caption)
    if isinstance(figure, PictureGrid):
        shown = _grid(figure, folder)
    else:
        shown = _img((folder / figure.path).read_bytes(), figure.caption)
    return f"<figure>{shown}<figcaption>{caption}</figcaption></figure>"


def _img(png: bytes, alt: str) -> str:
    return f'<img src="{_PICTURE}{base64.b64encode(png).decode()}" alt="{escape(alt)}">'


def _grid(grid: PictureGrid, folder: Path) -> str:
    """Each picture of the sheet in a cell of its own, under its caption and beside its method."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in grid.columns)
    with Image.open(folder / grid.path) as sheet:
        lines = []
        for row, name in enumerate(grid.rows):
            cells = [
                _img(_png(sheet.crop(grid.box(row, column, sheet.size))), f"{name}: {caption}")
                for column, caption in enumerate(grid.columns)
            ]
            pictures = "".join(f"<td>{cell}</td>" for cell in cells)
            lines.append(f'<tr><th scope="row">{escape(name)}</th>{pictures}</tr>')
    body = "\n".join(lines)
    return (
        f'<div class="wide"><table class="pictures">\n<thead><tr><td></td>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _png(picture: Image.Image) -> bytes:
    written = io.BytesIO()
    picture.save(written, "PNG", optimize=True)
    return written.getvalue()


def _table(table: Table, level: int) -> str:
    rows = "\n".join(
        "<tr>" + "".join(map(_cell, table.columns, row, marks)) + "</tr>"
        for row, marks in zip(table.rows, table.marks(), strict=True)
    )
    head = "".join(
        f'<th scope="col" data-kind="{"text" if column.kind == "text" else "number"}">'
        f"<button>{escape(column.heading)}</button></th>"
        for column in table.columns
    )
    title = f"<h{level}>{escape(table.title)}</h{level}>\n" if table.title else ""
    notes = "".join(f'<p class="note">{_words(text)}</p>\n' for text in (table.remark(), *table.footnotes) if text)
    grid = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    return f'{title}<div class="wide">{grid}</div>\n{notes}'


def _cell(column: Column, value: Value, mark: Mark) -> str:
    shown = escape(column.shown(value))
    shown = {"best": f"<b>{shown}</b>", "second": f"<u>{shown}</u>"}.get(mark, shown)
    if column.kind == "text":
        return f'<td data-value="{escape(value) if isinstance(value, str) else ""}">{shown}</td>'
    number = value[0] if isinstance(value, tuple) else value
    return f'<td class="number" data-value="{"" if number is None else escape(str(number))}">{shown}</td>'
