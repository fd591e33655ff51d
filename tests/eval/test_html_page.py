"""A page of tables as one file: everything inside, every text escaped, tables that a few lines of script sort."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import torch
from draftsmith.eval.figures import save_grid
from draftsmith.eval.html_page import html_page, outside_pictures, taken_apart
from draftsmith.eval.report import build, write
from draftsmith.eval.tables import Column, Figure, Items, PictureGrid, ReportSection, Table, text
from PIL import Image

from .rows import METHODS, measured_rows

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


def test_a_secret_does_not_pass_for_a_picture(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "supersecretvalue99")
    page = html_page("t", ['x <img src="data:image/png;base64,supersecretvalue99"'], tmp_path)
    assert "base64," in page and "supersecretvalue99" not in page
    strange = '<img src="data:image/png;base64,abcde">'  # no base64
    assert taken_apart(strange) == (strange, [])


def test_cells_carry_the_values_that_they_are_sorted_by(tmp_path):
    parsed = read(html_page("a", [table(compared=())], tmp_path))
    kinds = [attrs["data-kind"] for tag, attrs in parsed.tags if tag == "th"]
    assert kinds == ["text", "number", "number"]
    values = [attrs["data-value"] for tag, attrs in parsed.tags if tag == "td"]
    assert values == [EVIL, "2.5", "1234.5", "b", "3.5", ""]
    shown = [data for tag, data in parsed.texts if tag in ("td", "b", "u") and data.strip()]
    assert shown == [EVIL, "2.50 [2.00, 3.00]", "1,234.50", "b", "3.50 [3.00, 4.00]", "-"]
    assert [tag for tag, _ in parsed.tags].count("b") == 1, "the best tau"


def test_lists_sections_and_marked_words(tmp_path):
    section = ReportSection("How", (Items((f"**Warning**: `a` {EVIL}",)), table(title="inner")))
    parsed = read(html_page("a", [Items(("first",)), Items(()), section], tmp_path))
    assert parsed.texts.count(("li", "first")) == 1 and [tag for tag, _ in parsed.tags].count("ul") == 2
    assert ("b", "Warning") in parsed.texts and ("code", "a") in parsed.texts and ("h2", "How") in parsed.texts
    assert ("h3", "inner") in parsed.texts and any(EVIL in data for tag, data in parsed.texts if tag == "li")


def test_a_tables_remarks_are_those_of_the_markdown(tmp_path):
    columns = (text("m"), Column("DSR", unit="x"))
    one = Table("a", columns, (("M", 1.5),), source="LANTERN, table 1", note="A note.")
    page = html_page("a", [one], tmp_path)
    assert one.remark() in page and "Layout as in LANTERN, table 1." in page and "DSR depends on tau" in page


def test_each_picture_of_a_grid_stands_under_its_caption_beside_its_method(tmp_path):
    colors = torch.tensor([[[250, 0, 0], [0, 250, 0]], [[0, 0, 250], [250, 250, 0]], [[9, 9, 9], [99, 99, 99]]])
    save_grid(tmp_path / "grid.png", colors.reshape(6, 3, 1, 1).expand(6, 3, 8, 8).to(torch.uint8), columns=2)
    grid = PictureGrid("grid.png", "Pictures.", ("plain", EVIL, "c"), ("a red ball", EVIL))
    parsed = read(html_page("a", [grid], tmp_path))
    heads = [(attrs["scope"], data) for (tag, attrs), data in zip(
        [one for one in parsed.tags if one[0] == "th"], [data for tag, data in parsed.texts if tag == "th"], strict=True
    )]  # fmt: skip
    assert heads == [("col", "a red ball"), ("col", EVIL), ("row", "plain"), ("row", EVIL), ("row", "c")]
    shown = [attrs for tag, attrs in parsed.tags if tag == "img"]
    assert [attrs["alt"] for attrs in shown[:3]] == ["plain: a red ball", f"plain: {EVIL}", f"{EVIL}: a red ball"]
    for attrs, color in zip(shown, colors.reshape(6, 3).tolist(), strict=True):
        picture = Image.open(io.BytesIO(base64.b64decode(attrs["src"].split(",")[1])))
        assert picture.size == (96, 96) and set(picture.getdata()) == {tuple(color)}, "one picture, and no gap"


def test_pictures_are_neither_keys_nor_paths(tmp_path, monkeypatch):
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    png = (tmp_path / "a.png").read_bytes()
    inside = base64.b64encode(png).decode()[20:40]
    monkeypatch.setenv("MY_API_KEY", inside)
    monkeypatch.setenv("OTHER_API_KEY", "a<b&c>'d\"e")
    page = html_page("a", [Figure("a.png", "b"), Items((f"key {inside}, other a<b&c>'d\"e",))], tmp_path)
    text_alone, pictures = taken_apart(page)
    assert pictures == [png] and inside not in text_alone
    assert ("li", "key <hidden>, other <hidden>") in read(page).texts, "as text, and not as a tag"
    assert outside_pictures(page, str.upper).count(base64.b64encode(png).decode()) == 1


def test_a_reports_page_says_what_its_markdown_and_json_say(tmp_path):
    """The same sentences, and in every cell of a table the value that report.json has."""
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    section = ReportSection("Where heads look", (table(), Figure("a.png", "Shares.")))
    rows = measured_rows(verify_s=0.02, plain_cycle_s=0.02)
    write(tmp_path, build(rows, about={"seed": EVIL}, methods=METHODS, sections=[section]), rows)
    page, data = (tmp_path / "report.html").read_text(), json.loads((tmp_path / "report.json").read_text())
    parsed, markdown = read(page), (tmp_path / "report.md").read_text()
    texts = [data for _, data in parsed.texts]
    assert [("li", sentence) for sentence in data["findings"]] == [one for one in parsed.texts if one[0] == "li"][
        : len(data["findings"])
    ]
    values = [attrs["data-value"] for tag, attrs in parsed.tags if tag == "td"]
    tables = [*data["tables"], *(one for part in data["sections"] for one in part["tables"])]
    in_order = [cell for one in tables for row in one["rows"] for cell in row]
    assert values == ["" if v is None else str(v[0] if isinstance(v, list) else v) for v in in_order]
    titles = [title.lstrip("# ") for title in re.findall(r"^##+ .*$", markdown, re.MULTILINE)]
    headings = [re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", title) for title in titles]  # as a reader of Markdown shows them
    assert [title for tag, title in parsed.texts if tag in ("h2", "h3")] == headings
    assert any(EVIL in text for text in texts) and "EAGLE: drafter eagle, tree 30-4-8" in texts
    names = [name.split("(")[1][:-1] for name in re.findall(r"!\[.*?\]\(.*?\)", markdown)]
    assert taken_apart(page)[1] == [(tmp_path / name).read_bytes() for name in names]
    assert not re.search(r"""(src|href)=["'](?!["'])|url\(|@import|https?:""", taken_apart(page)[0])
