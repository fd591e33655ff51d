"""A page of tables as one file: everything inside, every text escaped, tables that a few lines of script sort."""

import re
from html.parser import HTMLParser

from draftsmith.eval.html_page import html_page
from draftsmith.eval.tables import Column, Figure, Table, text
from PIL import Image

EVIL = "<script>alert('x')</script>&\"'"
VOID = {"meta", "img"}


class Read(HTMLParser):
    """Tags and attributes in their order; fails where one is not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


def read(page: str) -> Read:
    parser = Read()
    parser.feed(page)
    parser.close()
    assert not parser.open
    return parser


def table(**changes) -> Table:
    columns = (text("run"), Column("tau [95%]", kind="interval"), Column("hours", ",.2f", ranked=False))
    rows = ((EVIL, (2.5, 2.0, 3.0), 1234.5), ("b", (3.5, 3.0, 4.0), None))
    return Table(**({"title": EVIL, "columns": columns, "rows": rows, "note": EVIL, "footnotes": (EVIL,)} | changes))


def test_every_text_is_escaped_and_nothing_comes_from_elsewhere(tmp_path):
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    page = html_page(EVIL, [EVIL, table(), Figure("a.png", EVIL)], tmp_path)
    parsed = read(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 1, "ours alone"
    named = [value for _, attrs in parsed.tags for name, value in attrs.items() if name in ("src", "href")]
    assert len(named) == 1 and named[0].startswith("data:image/png;base64,iVBOR")
    assert "http" not in page and not re.search(r"@import|url\(", page)
    shown = [data for tag, data in parsed.texts if EVIL in data and tag != "script"]
    assert len(shown) == 8, "title twice, paragraph, heading, cell, note, footnote and caption as they were written"


def test_cells_carry_the_values_that_they_are_sorted_by(tmp_path):
    parsed = read(html_page("a", [table(compared=())], tmp_path))
    kinds = [attrs["data-kind"] for tag, attrs in parsed.tags if tag == "th"]
    assert kinds == ["text", "number", "number"]
    values = [attrs["data-value"] for tag, attrs in parsed.tags if tag == "td"]
    assert values == [EVIL, "2.5", "1234.5", "b", "3.5", ""]
    shown = [data for tag, data in parsed.texts if tag in ("td", "b", "u") and data.strip()]
    assert shown == [EVIL, "2.50 [2.00, 3.00]", "1,234.50", "b", "3.50 [3.00, 4.00]", "-"]
    assert [tag for tag, _ in parsed.tags].count("b") == 1, "the best tau"
