"""A page of Markdown as one file: everything inside, every text escaped, tables that a few lines of script sort."""

import base64
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

from draftsmith.core.errors import UserError
from draftsmith.core.markdown import plain
from draftsmith.eval.report import build, write
from draftsmith.eval.tables import Column, Figure, ReportSection, Table, html_page, markdown, text
from draftsmith.trainers.evaluate.reporting import answer_parts, examples
from halves_tiny import chat_tokenizer
from PIL import Image

from .rows import METHODS, a_row, measured_rows

EVIL = "<script>alert('x')</script>&\"'"
VOID = {"meta", "img", "br"}
RECORD = {"conversations": [{"from": "human", "value": f"{EVIL}\n`"}, {"from": "gpt", "value": "not this"}]}


class Read(HTMLParser):
    """Tags and attributes in their order; fails where one is not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

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


def page_of(folder, *parts, title="a"):
    return html_page("\n".join([f"# {plain(title)}", "", *(line for part in parts for line in markdown(part))]), folder)


def test_every_text_is_escaped_and_nothing_comes_from_elsewhere(tmp_path):
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    page = page_of(tmp_path, EVIL, table(), Figure("a.png", EVIL), title=EVIL)
    parsed = read(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 1, "ours alone"
    named = [value for _, attrs in parsed.tags for name, value in attrs.items() if name in ("src", "href")]
    assert len(named) == 1 and named[0].startswith("data:image/png;base64,iVBOR")
    assert "http" not in page and not re.search(r"@import|url\(", page)
    shown = [data for tag, data in parsed.texts if EVIL in data and tag != "script"]
    assert len(shown) == 8, "title twice, paragraph, heading, cell, note, footnote and caption as they were written"
    strange = 'x <img src="data:image/png;base64,abcd">'
    assert "img" not in {tag for tag, _ in read(page_of(tmp_path, strange)).tags}
    links = "[a](https://b.c) ![x](//b.c/d.png) [y](javascript:1) <https://b.c>"  # of a page that somebody wrote
    assert {tag for tag, _ in read(html_page(links, tmp_path)).tags} & {"a", "img"} == set()


def test_columns_of_numbers_are_aligned_and_the_best_is_marked(tmp_path):
    parsed = read(page_of(tmp_path, table(compared=())))
    assert [attrs.get("style") for tag, attrs in parsed.tags if tag == "th"] == [None, *["text-align:right"] * 2]
    shown = [data for tag, data in parsed.texts if tag in ("td", "strong", "u") and data.strip()]
    assert shown == [EVIL, "2.50 [2.00, 3.00]", "1,234.50", "b", "3.50 [3.00, 4.00]", "-"]
    tags = [tag for tag, _ in parsed.tags]
    assert tags.count("strong") == tags.count("u") == 1, "the best tau, and the second"


def test_a_reports_page_says_what_its_markdown_says_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "supersecretvalue99")
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    section = ReportSection("Where heads look", (table(), Figure("a.png", "Shares."), "supersecretvalue99"))
    rows = measured_rows(verify_s=0.02, plain_cycle_s=0.02)
    write(tmp_path, build(rows, about={"seed": EVIL}, methods=METHODS, sections=[section]), rows)
    page, data = (tmp_path / "report.html").read_text(), json.loads((tmp_path / "report.json").read_text())
    parsed, written = read(page), (tmp_path / "report.md").read_text()
    texts = [data for _, data in parsed.texts]
    assert [("li", finding) for finding in data["findings"]] == [one for one in parsed.texts if one[0] == "li"][:1]
    assert "<hidden>" in texts and "supersecretvalue99" not in page + written
    assert any(EVIL in text for text in texts) and "EAGLE: drafter eagle, tree 30-4-8" in texts
    names = re.findall(r"!\[.*?\]\((.*?)\)", written)
    shown = [attrs["src"].split(",")[1] for tag, attrs in parsed.tags if tag == "img"]
    assert [base64.b64decode(data) for data in shown] == [(tmp_path / name).read_bytes() for name in names]


class Asked(tuple):
    name, title, mode, drafter_name, benchmark = "M", EVIL, "M", "", "photos"
    method, config = SimpleNamespace(rule=SimpleNamespace(is_exact=True)), SimpleNamespace(trains_on="records")

    def request(self, index, **settings):
        if index:
            raise UserError("no such file")
        return SimpleNamespace(originals=[Image.new("RGB", (900, 90))] * 9), None


def test_examples_show_letter_by_letter_what_was_proposed(tmp_path):
    tokenizer, one = chat_tokenizer(), Asked("123")
    one.dataset = SimpleNamespace(sample_id="r{}".format, record=lambda index: RECORD, request=one.request)
    text = lambda ids, special: tokenizer.decode(list(ids), skip_special_tokens=not special)  # noqa: E731
    ids = tokenizer(f"{EVIL} `` **x**  q  q  q  q  é \x1b[2J\u202e\n<|im_end|>")["input_ids"]
    cycles = [[min(size, len(ids) - place) - 1 for place in range(1, len(ids), size)] for size in (2, 1, 4)]
    rows = [a_row(request=f"r{number}", tokens=ids, accepted=accepted) for number, accepted in enumerate(cycles)]
    context, stage = SimpleNamespace(folder=tmp_path), SimpleNamespace(temperatures=[1.0, 0.0])
    measuring = SimpleNamespace(context=context, stage=stage, lengths=[64], drafting=[one], text=text)
    page = read(page_of(tmp_path, *examples(measuring, rows, [one])))
    answer = f"{EVIL} `` **x**  q  q  q  q  é \\x1b[2J\\u202e\\n<|im_end|>"
    assert "".join(data for tag, data in page.texts if tag == "code") == f"{EVIL}\\n`{answer}" * 3
    titles = re.findall(r"(\w+) tau: \S+ \((r\d)\)", str(page.texts))
    assert titles == [("best", "r2"), ("median", "r0"), ("worst", "r1")]
    assert sum("Its pictures cannot be shown: no such file." in data for _, data in page.texts) == 2
    assert [Image.open(path).size for path in tmp_path.glob("*.jpeg")] == [(96, 10)] * 4, "of nine large ones"
    assert [line == answer for line in (tmp_path / "examples.txt").read_text().splitlines()[2::3]] == [False, True]
    assert answer_parts(a_row(accepted=(1, 0), tokens=tokenizer("aéb")["input_ids"]), text) == [("aéb", False)]
