"""Tables, figures and sections of a report as data, and the writers that make Markdown, JSON and HTML of them.

Every text is escaped: names come from recipes and reports, which may be a stranger's.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from rich.cells import cell_len, set_cell_size

from ..core.json_types import JsonMapping, JsonObject
from ..core.markdown import cell, filled, label, plain, sentence
from .measured_rows import PLAIN

# None: not measured; a table takes NaN for it. Of a column of kind interval (value, low, high), of kind count (how
# many, of how many).
Value = None | str | float | tuple[float | None, ...]
Mark = Literal["", "best", "second"]


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading and the format of its values."""

    name: str
    format: str = ".2f"  # of str.format, for each number
    unit: str = ""  # after the number; only speedups, expected or measured, have the unit x
    kind: Literal["text", "number", "interval", "count"] = "number"
    group: str = ""  # heading above several columns: a set, a length
    ranked: bool = True  # more is better: the best of compared lines is marked

    @property
    def heading(self) -> str:
        """Group and name in one line; the name alone without a group."""
        return f"{self.group} {self.name}".strip()

    def shown(self, value: Value) -> str:
        """A value as text, with format and unit; "-" where nothing was measured."""
        if value is None:
            return "-"
        if isinstance(value, str):
            return value
        numbers = _numbers(value)
        if len(numbers) == 1:
            return f"{numbers[0]:{self.format}}{self.unit}"
        if self.kind == "count":
            return "/".join(f"{part:.0f}" for part in numbers)
        middle, low, high = numbers
        ends = self.format.lstrip("+")
        return f"{middle:{self.format}}{self.unit} [{low:{ends}}, {high:{ends}}]"


def text(name: str) -> Column:
    """A column of words."""
    return Column(name, "", kind="text")


@dataclass(frozen=True)
class Table:
    """A table of a report."""

    title: str  # "": it stands under its section's
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    source: str = ""  # the paper and table whose shape it has
    note: str = ""
    # Columns of words in which lines agree that are compared with one another: best and second best of each number are
    # marked. None: no marks.
    compared: tuple[str, ...] | None = None
    footnotes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), f"{self.title}: lines and columns differ"
        object.__setattr__(self, "rows", tuple(tuple(map(_measured, row)) for row in self.rows))

    def column(self, heading: str) -> list[Value]:
        """The values under a heading."""
        number = [column.heading for column in self.columns].index(heading)
        return [row[number] for row in self.rows]

    def on_tau(self) -> str:
        """A sentence that names the columns which depend on tau, and at what tau they hold; "" where none does."""
        names = list(dict.fromkeys(column.name for column in self.columns if column.unit == "x"))
        if not names:
            return ""
        has_tau = any(column.name.split(" ")[0] == "tau" for column in self.columns)
        where = "in its row" if has_tau else "that this report gives for its sets and its method"
        what = f"{', '.join(names)} depend{'s' if len(names) == 1 else ''} on tau"
        return f"{what}: each holds only at the tau {where}, for these requests, this temperature and this drafter."

    def remark(self) -> str:
        """The text under the table: note, what marks mean, what columns depend on, and whose table's layout it has."""
        among = f" among the lines of one {' and '.join(self.compared)}" if self.compared else ""
        marked = f"Bold is the best value of a column{among}, underlined the second best."
        notes = (self.note, marked if any(map(any, self.marks())) else "", self.on_tau(),
                 f"Layout as in {self.source}." if self.source else "")  # fmt: skip
        return " ".join(note for note in notes if note)

    def marks(self) -> list[list[Mark]]:
        """The marks of each value. Lines of plain decoding are what others are compared with, and have none."""
        marks: list[list[Mark]] = [[""] * len(self.columns) for _ in self.rows]
        if self.compared is None:
            return marks
        within = [n for n, column in enumerate(self.columns) if column.heading in self.compared]
        groups: dict[tuple[Value, ...], list[int]] = {}
        for number, row in enumerate(self.rows):
            if PLAIN not in row:
                groups.setdefault(tuple(row[n] for n in within), []).append(number)
        for numbers in groups.values():
            for place, column in enumerate(self.columns):
                if column.ranked and column.kind in ("number", "interval"):
                    for number, mark in zip(numbers, best([self.rows[n][place] for n in numbers]), strict=True):
                        marks[number][place] = mark
        return marks

    def to_json(self) -> JsonObject:
        """Columns with their formats, and rows of plain values."""
        return asdict(self) | ({"on_tau": said} if (said := self.on_tau()) else {})


@dataclass(frozen=True)
class Figure:
    path: str  # relative to the page
    caption: str


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    entries: tuple[str, ...]


@dataclass(frozen=True)
class ReportSection:
    """Part of a page: a probe, or one of the papers' studies."""

    title: str
    content: tuple[str | Items | Table | Figure, ...]
    name: str = ""  # under which report.json has `data`
    data: JsonMapping = field(default_factory=dict)


Part = str | Items | Table | Figure | ReportSection


def _numbers(value: Value) -> tuple[Any, ...]:
    if value is None or isinstance(value, str):
        return ()
    return value if isinstance(value, tuple) else (value,)


def _measured(value: Value) -> Value:
    """None where a number, or one of several, is missing or NaN: a ratio over nothing."""
    return None if any(number is None or math.isnan(number) for number in _numbers(value)) else value


def best(values: Sequence[Value]) -> list[Mark]:
    """Best and second best as they are printed, to two decimals: what prints alike is marked alike."""
    printed = [round(numbers[0], 2) if (numbers := _numbers(value)) else None for value in values]
    first, second, *_ = *sorted({value for value in printed if value is not None}, reverse=True), math.nan, math.nan
    if math.isnan(second):
        return ["" for _ in values]
    return ["best" if value == first else "second" if value == second else "" for value in printed]


def markdown(part: Part, *, level: int = 2) -> list[str]:
    """The lines of a part of a page."""
    match part:
        case str():
            return [sentence(part), ""]
        case Items():
            return [*(f"- {sentence(entry)}" for entry in part.entries), ""]
        case Figure():
            return [f"![{label(part.caption)}]({part.path})", "", sentence(part.caption), ""]
        case ReportSection():
            inner = (line for each in part.content for line in markdown(each, level=level + 1))
            return [f"{'#' * level} {sentence(part.title)}", "", *inner]
        case Table():
            return _table(part, level)


def _table(table: Table, level: int) -> list[str]:
    """A table under its title; best in bold, second best underlined."""
    lines = [f"{'#' * level} {plain(table.title)}", ""] if table.title else []
    signs = {"": "{}", "best": "**{}**", "second": "<u>{}</u>"}
    rows = [[signs[mark].format(cell(column.shown(value)))
             for column, value, mark in zip(table.columns, row, marks, strict=True)]
            for row, marks in zip(table.rows, table.marks(), strict=True)]  # fmt: skip
    head: list[str] = [cell(column.heading) for column in table.columns]
    grid = [head, ["---" if column.kind == "text" else "---:" for column in table.columns], *rows]
    lines += [*("| " + " | ".join(cells) + " |" for cells in grid), ""]
    if remark := table.remark():
        lines += [sentence(remark), ""]
    return [*lines, *(f"- {sentence(footnote)}" for footnote in table.footnotes), *([""] if table.footnotes else [])]


def for_terminal(table: Table) -> list[str]:
    """The lines of a table in columns, without Markdown; * follows the best value of a column."""
    marks = table.marks()
    grid = [[column.heading for column in table.columns]]
    for row, of_row in zip(table.rows, marks, strict=True):
        each = zip(table.columns, row, of_row, strict=True)
        grid.append([" ".join(column.shown(value).split()) + "*" * (mark == "best") for column, value, mark in each])
    widths = [max(map(cell_len, column)) for column in zip(*grid, strict=True)]
    grid.insert(1, ["-" * width for width in widths])
    lines = ["  ".join(map(set_cell_size, row, widths)).rstrip() for row in grid]
    starred = "* is the best value of a column." if any("best" in of_row for of_row in marks) else ""
    note = " ".join(note for note in (table.note, starred, table.on_tau()) if note)
    footnotes = [f"- {footnote}" for footnote in table.footnotes]
    return [table.title, *lines, "", *([note, ""] if note else []), *([*footnotes, ""] if footnotes else [])]


def html_page(markdown: str, folder: Path) -> str:
    """A page of Markdown as one HTML file: pictures inside, tables that sort, nothing fetched from elsewhere.
    markdown-it escapes every text; `page.html.jinja` has the frame, style and script.

    Args:
        markdown: of a page that begins with its title, as it is to be read: secrets are taken out before, so that none
            is looked for in a picture's data.
        folder: where the PNG and JPEG files (.jpeg) lie that it shows.
    """
    from markdown_it import MarkdownIt  # nothing but a page needs it

    def image(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        caption = escape(renderer.renderInlineAsText(tokens[index].children, options, env))
        path = folder / unquote(str(tokens[index].attrs["src"]))
        if not path.is_file():
            return caption
        data = base64.b64encode(path.read_bytes()).decode()
        return f'<img src="data:image/{path.suffix[1:]};base64,{data}" alt="{caption}">'

    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    reader.disable(["link", "autolink"])
    reader.add_render_rule("image", image)
    reader.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
    reader.add_render_rule("table_close", lambda *_: "</table></div>\n")
    # The one tag that our tables have: the second best value of a column.
    body = re.sub(r"&lt;u&gt;([^<&]*)&lt;/u&gt;", r"<u>\1</u>", reader.render(markdown))
    heading = re.match(r"<h1>(.*?)</h1>", body)
    title = "" if heading is None else re.sub(r"<.*?>", "", heading[1])  # escaped, as the body is
    return filled(Path(__file__).parent / "page.html.jinja", title=title, body=body)
