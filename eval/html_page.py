"""A page of tables and pictures as one HTML file: pictures inside, tables that sort, nothing fetched from elsewhere.

Every text is escaped: names come from recipes and reports, which may be a stranger's.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from .tables import Column, Figure, Mark, Table, Value

Part = str | Table | Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
       color: #222; background: #fff }
table { border-collapse: collapse; margin: .5rem 0 1rem } .wide { overflow-x: auto }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
th button { font: inherit; font-weight: 600; border: 0; padding: 0; background: none; color: inherit;
            cursor: pointer; text-align: left }
th[aria-sort=ascending] button::after { content: " \\2191" }
th[aria-sort=descending] button::after { content: " \\2193" }
.note { color: #555; max-width: 60rem } img { max-width: 100% }
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


def html_page(title: str, parts: Sequence[Part], folder: Path) -> str:
    """The whole document.

    Args:
        parts: paragraphs, tables and figures in their order.
        folder: where the figures' PNG files lie.
    """
    body = "\n".join(_part(part, folder) for part in parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _part(part: Part, folder: Path) -> str:
    if isinstance(part, Table):
        return _table(part)
    if isinstance(part, Figure):
        data = base64.b64encode((folder / part.path).read_bytes()).decode()
        caption = escape(part.caption)
        picture = f'<img src="data:image/png;base64,{data}" alt="{caption}">'
        return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"
    return f"<p>{escape(part)}</p>"


def _table(table: Table) -> str:
    rows = "\n".join(
        "<tr>" + "".join(map(_cell, table.columns, row, marks)) + "</tr>"
        for row, marks in zip(table.rows, table.marks(), strict=True)
    )
    head = "".join(
        f'<th scope="col" data-kind="{"text" if column.kind == "text" else "number"}">'
        f"<button>{escape(column.heading)}</button></th>"
        for column in table.columns
    )
    title = f"<h2>{escape(table.title)}</h2>\n" if table.title else ""
    notes = "".join(f'<p class="note">{escape(text)}</p>\n' for text in (table.note, *table.footnotes) if text)
    grid = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    return f'{title}<div class="wide">{grid}</div>\n{notes}'


def _cell(column: Column, value: Value, mark: Mark) -> str:
    shown = escape(column.shown(value))
    shown = {"best": f"<b>{shown}</b>", "second": f"<u>{shown}</u>"}.get(mark, shown)
    if column.kind == "text":
        return f'<td data-value="{escape(value) if isinstance(value, str) else ""}">{shown}</td>'
    number = value[0] if isinstance(value, tuple) else value
    return f'<td class="number" data-value="{"" if number is None else escape(str(number))}">{shown}</td>'
