"""The report of any target's evaluation: its table, findings, files; and what does not hold is said."""

import dataclasses
import json
import re

from draftsmith.eval.measured_rows import read_rows
from draftsmith.eval.report import Comparison, build, write
from draftsmith.eval.tables import Column, Figure, ReportSection, Table
from markdown_it import MarkdownIt
from PIL import Image

from .rows import METHODS, measured_rows


def test_two_trainings_over_seeds_are_compared():
    names = ("new", "new_1", "old", "old_1")
    some = [dataclasses.replace(r, drafter=name) for name in names for r in measured_rows() if r.mode == "M"]
    ways = Comparison(first=["new", "new_1"], second=["old", "old_1"])
    report = build(some, about={}, methods=METHODS, compare=ways)
    assert list(report.to_json()["comparison"]) == ["pictures, mode M", "clips, mode M"]
    line = next(line for line in report.tables[-1].rows if line[0] == "first trainings - second")
    assert line[1] == "pictures, mode M" and line[2][0] == 0.0


ABOUT = {"run": "tiny, stage evaluate", "target": "/models/my-llava", "device": "CPU (arm64), 1 thread(s)",
         "date": "2026-01-02"}  # fmt: skip


def test_files(tmp_path):
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    section = ReportSection("Where heads look", (Figure("a.png", "Shares."),), "attention", {"M": 0.5})
    report = build(measured_rows(), about=ABOUT, methods=METHODS, sections=[section])
    write(tmp_path, report, measured_rows())
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["version"] == 2 and data["about"] == ABOUT and data["sections"][0]["data"] == {"M": 0.5}
    cell = data["cells"][0]
    assert cell["benchmark"] == "pictures" and cell["requests"] == 6 and len(cell["tau_interval"]) == 2
    page = (tmp_path / "report.md").read_text()
    title = "tiny, stage evaluate: speculative decoding, target my-llava, CPU (arm64), 2026-01-02"
    wanted = [f"# {title}", "| pictures | M | 6 |"]
    html = (tmp_path / "report.html").read_text()
    assert f"<title>{title}</title>" in html and f"<h1>{title}</h1>" in html
    wanted += ["## Where heads look", "![Shares.](a.png)"]
    wanted += ["- device: CPU (arm64), 1 thread(s)", "- EAGLE: drafter eagle, tree 30-4-8"]
    wanted += [
        "![Share of drafted tokens accepted, by depth; the numbers are n, the cycles of each point.](acceptance.png)"
    ]
    for words in wanted:
        assert words in page, words
    assert page.index("## All results") < page.index("## Where heads look")
    assert len(read_rows(tmp_path / "rows.jsonl")) == 36
    for name in ("acceptance.png", "speedup.png"):
        assert (tmp_path / name).stat().st_size > 10_000


HOSTILE = "x|<img src=x onerror=alert(1)> [in](https://evil.example) ![p](https://evil.example/p)\n# `y` <!--"


def test_names_show_letter_by_letter(tmp_path):
    """Of methods, sets, prompts and targets: another's recipe must make no picture, link or heading of a report."""
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    some = [dataclasses.replace(row, method=HOSTILE, benchmark=HOSTILE) for row in measured_rows() if row.mode == "M"]
    plain = [dataclasses.replace(row, benchmark=HOSTILE) for row in measured_rows() if row.method == "plain"]
    table = Table(HOSTILE, (Column(HOSTILE, kind="text"),), ((HOSTILE,),), note=HOSTILE, footnotes=(HOSTILE,))
    section = ReportSection(HOSTILE, (HOSTILE, Figure("a.png", HOSTILE), table))
    about = {"run": HOSTILE, "target": HOSTILE, HOSTILE: HOSTILE}
    report = build(
        [*plain, *some], about=about, methods={HOSTILE: METHODS["M"]}, sections=[section], warnings=[HOSTILE]
    )
    write(tmp_path, report, some)
    page = (tmp_path / "report.md").read_text()
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    inner = [child for token in tokens for child in token.children or ()]
    assert not [token for token in (*tokens, *inner) if token.type in ("html_block", "html_inline", "link_open")]
    assert {child.attrs["src"] for child in inner if child.type == "image"} <= {
        "a.png", "speedup.png", "acceptance.png", "methods.png"
    }  # fmt: skip
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert all("evil" not in line or re.search(r"x\\\|\\<img", line) for line in rows)
    assert sum(token.type == "heading_open" and token.tag == "h1" for token in tokens) == 1
    assert "<script" not in page and page.count("\n# ") == 0
