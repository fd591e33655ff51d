"""Tables of the pages that show what demos measured: written from docs/results, of one commit (scripts/results.py)."""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from draftsmith.core.errors import UserError
from draftsmith.eval.cells import placed
from draftsmith.eval.contrasts import drafters_table
from draftsmith.eval.figures import save_grid
from draftsmith.eval.html_page import html_page
from draftsmith.eval.measured_rows import frame
from draftsmith.eval.tables import PictureGrid
from PIL import Image
from rows import a_row

ROOT = Path(__file__).resolve().parents[2]
CELL = {
    "benchmark": "pictures", "turn": "", "budget": "", "temperature": 0.0, "method": "M", "requests": 12,
    "tau": 4.123456789, "tau_interval": [3.9, 4.3], "DSR": 1.4, "DSR_spread": [1.2, 1.6], "identical": 12,
    "exact": True, "accepted_histogram": [1, 2, 3],
}  # fmt: skip


@pytest.fixture(scope="module")
def results():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("results")
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def tables(results):
    return importlib.import_module("result_tables")


def run(folder, seed, commit="a" * 40, changed=0, more=None):
    (folder / "evaluate").mkdir(parents=True)
    about = {"recipe": "lvlm.yaml", "git": {"commit": commit, "changed_files": changed}}
    (folder / "run.yaml").write_text(yaml.safe_dump(about))
    said = {"seed": seed, "device": "CPU", "date": "2026-11-26", "torch": "2.13.0", "command": "..."}
    report = {
        "about": said,
        "binding": {"accuracy": 0.75},
        "findings": ["..."],
        "cells": [CELL],
        "tables": [],
        "sections": [],
    }
    report |= more or {}
    (folder / "evaluate" / "report.json").write_text(json.dumps(report))
    return folder


def test_every_page_has_the_tables_of_what_was_measured(results):
    assert results.main(["check"]) == 0, "scripts/results.py write, and read what it changed"


NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"
INTERVAL = re.compile(rf"({NUMBER})(?:x|%)? [\[(]({NUMBER})(?:x|%)?(?:, | to )({NUMBER})(?:x|%)?[\])]")
DATED = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def intervals(text):
    """Value, low and high as written -> the same as numbers, with the decimals of the value."""
    return {
        m[0]: (len(m[1].partition(".")[2]), *(float(part.replace(",", "")) for part in m.groups()))
        for m in INTERVAL.finditer(text)
    }


def hand_typed(pages, records):
    """Intervals in sentences that none of a table or a record rounds to, whichever way the difference is taken."""
    known = set()
    for text in [*records, *("".join(re.findall(r"^\|.*\n", page, re.M)) for page in pages)]:
        for _, value, low, high in intervals(text).values():
            for places in range(4):
                known.add((places, *(round(n, places) for n in (value, low, high))))
                known.add((places, *(round(-n, places) for n in (value, high, low))))
    return [
        said
        for page in pages
        # A number of another day says its day.
        for part in re.split(r"\n(?:\n|- )", re.sub(r"```.*?```|^\|.*\n", "", page, flags=re.M | re.S))
        if not DATED.search(part)
        for said, numbers in intervals(part).items()
        if numbers not in known
    ]


def test_intervals_in_sentences_are_those_of_the_tables(results):
    """Prose beside a table that is written anew keeps none of the old one."""
    records = []
    for path in sorted((ROOT / "docs" / "results").rglob("*.json")):
        records.append(path.read_text())
        for pair in re.findall(r'"(?:tau|difference|mean)": (\S+), "(?:tau_)?interval": (\[[^\]]+\])', records[-1]):
            records.append(" ".join(pair))
    pages = [page.read_text() for page in results.pages()]
    assert hand_typed(pages, records) == []
    assert len([said for page in pages for said in intervals(page)]) > 500


def test_an_interval_of_an_earlier_run_is_found():
    table = "| M | +0.614 [0.402, 0.831] | 1.50x (1.38 to 1.61) |\n"
    right = "It is ahead by 0.61 [0.40, 0.83], T behind by -0.614 [-0.831, -0.402], at 1.50x (1.38 to 1.61).\n"
    stale = "It is ahead by 0.67 [0.51, 0.82].\n\n- On 2026-11-25 by 0.68 [0.50, 0.82].\n- At 1.50x (1.38 to 1.62).\n"
    assert hand_typed([table + "\n" + right], []) == []
    assert hand_typed([table, stale], []) == ["0.67 [0.51, 0.82]", "1.50x (1.38 to 1.62)"]


def test_a_changed_number_in_a_page_is_named_and_written_anew(results, tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    text = (ROOT / "README.md").read_text()
    mark = "<!-- results: compare-readme -->"
    cut = text.index("x |", text.index(mark))
    page.write_text(text[: cut - 1] + "9" + text[cut:])
    monkeypatch.setattr(results, "pages", lambda: [page])
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(importlib.import_module("result_figures"), "draw", lambda: None)
    assert results.main(["check"]) == 1 and capsys.readouterr().out == "README.md\n"
    assert results.main(["write"]) == 0 and page.read_text() == text
    assert results.main(["check"]) == 0


def test_a_table_is_written_apart_from_the_text_behind_it(results, tables, monkeypatch):
    monkeypatch.setitem(tables.TABLES, "few", lambda: [["a", "b"], ["1", "2"]])
    written = "<!-- results: few -->\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\nText.\n"
    for before in ("", "| a |\n", "| a |\n\n"):  # no table yet; one that touches the text; as it should be
        assert results.rewritten(f"<!-- results: few -->\n\n{before}Text.\n") == written
    assert results.rewritten(written) == written


def test_a_mark_without_a_table_is_named(results):
    with pytest.raises(UserError, match="a page marks a table 'compar', and none has this name"):
        results.rewritten("<!-- results: compar -->\n\nText.\n")
    with pytest.raises(UserError, match=r"columns .'taw'., and none has this name"):
        results.rewritten("<!-- results: cells smollm2: method, taw -->\n\nText.\n")
    with pytest.raises(UserError, match="no benchmark 'statis' was kept"):
        results.rewritten("<!-- results: printed statis 1 -->\n\nText.\n")
    with pytest.raises(UserError, match="states printed 3 tables, and the page asks for table 4"):
        results.rewritten("<!-- results: printed states 4 -->\n\nText.\n")


def test_every_table_is_on_a_page_and_every_mark_has_its_table(results, tables):
    marked = re.findall(r"^<!-- results: (.+) -->$", "\n".join(page.read_text() for page in results.pages()), re.M)
    as_printed = [name for name in marked if name.startswith("printed ")]
    queries = {name for name in marked if name.startswith("cells ")}
    assert set(tables.TABLES) == set(marked) - set(as_printed) - queries and len(queries) == 4
    assert len(as_printed) == len(set(as_printed)) > 20


def test_all_tables_are_of_one_commit(tables):
    """But for recipes that are newer than it, each of one commit of its own, and for benchmarks that are gone."""
    folder, later = ROOT / "docs" / "results", tables.recorded.LATER
    commands = importlib.import_module("result_benchmarks").COMMANDS
    runs = {path.stem: [*json.loads(path.read_text()).values()] for path in folder.glob("*.json")}
    common = [run for recipe, kept in runs.items() if recipe not in later for run in kept]
    benchmarks = {path.stem: json.loads(path.read_text()) for path in (folder / "benchmarks").glob("*.json")}
    gone = [run for name, run in benchmarks.items() if name not in {*commands, *later}]
    assert sum(map(len, runs.values())) > 23 and len(benchmarks) > 20 and len(gone) == 14
    (commit,) = {run["commit"] for run in [*common, *(benchmarks[name] for name in commands if name not in later)]}
    (last,) = {run["commit"] for run in gone}
    assert f"is the code of commit {last[:7]}." in (folder / "benchmarks.md").read_text()
    readme, page = (ROOT / "README.md").read_text(), (folder / "benchmarks.md").read_text()
    for name in later:
        (own,) = {run["commit"] for run in runs.get(name) or [benchmarks[name]]}
        assert own != commit, "it was measured with the others: take it out of LATER"
        said = readme if f"results: {name}-readme -->" in readme else page
        assert f"of commit {own[:7]}" in said, "the line beside its table says of which code it is"


def test_no_place_of_a_machine_is_kept():
    """Absolute paths of folders: the commands' own are replaced, and temporary ones are."""
    for path in (ROOT / "docs" / "results").rglob("*.json"):
        assert re.findall(r"(?<![\w.:/<])/(?:[\w.-]+/)+[\w.-]*", path.read_text()) == [], path.name


@pytest.fixture
def benchmarks(results, monkeypatch, tmp_path):
    module = importlib.import_module("result_benchmarks")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "benchmarks")
    return module


@pytest.fixture
def clone(tmp_path):
    """A folder with a commit, in which a benchmark can run."""
    folder = tmp_path / "clone"
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / "bench.py").write_text("import sys\nprint(__file__, sys.argv[1])\nsys.exit(int(sys.argv[2]))\n")
    for words in (["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def test_what_a_benchmark_prints_is_kept_with_its_commit_and_without_our_paths(benchmarks, clone, monkeypatch):
    monkeypatch.setattr(benchmarks, "COMMANDS", {"one": f"{sys.executable} {{code}}/bench.py {{code}}/x 0"})
    kept = json.loads(benchmarks.measure("one", clone, {"code": str(clone)}).read_text())
    assert benchmarks.without_places(f"in {tempfile.gettempdir()}/a", clone) == "in TEMPORARY/a"
    assert kept["output"] == ["bench.py x"] and kept["command"].endswith("{code}/bench.py {code}/x 0")
    assert kept["commit"] == subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=clone, text=True).strip()
    assert len(kept["load"]) == 2 and kept["date"] and kept["device"]


@pytest.mark.parametrize(
    ("name", "folders", "told"),
    [
        ("two", {}, "no benchmark 'two'"),
        ("one", {}, "one needs a folder 'code'"),
        ("one", {"code": "CLONE"}, "bench.py x 7 ended with 7"),
        ("changed", {"code": "CLONE"}, "its code is not that of a commit"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_nothing_is_kept(benchmarks, clone, monkeypatch, name, folders, told):
    command = f"{sys.executable} {{code}}/bench.py x 7"
    monkeypatch.setattr(benchmarks, "COMMANDS", {"one": command, "changed": command})
    if name == "changed":
        (clone / "bench.py").write_text("")
    with pytest.raises(UserError, match=told):
        benchmarks.measure(name, clone, {key: str(clone) for key in folders})
    assert not benchmarks.RESULTS.exists()


def test_what_misses_its_bound_is_marked(tables):
    rows = [["what", "median"], ["a", "1.12 [1.0, 1.2]"], ["b", "0.9 [0.8, 1.0]"], ["c", "6.1% [5, 7]"], ["d", "-"]]
    found = tables.benchmarks.judged(rows, 1, "{:g}", {"a": 1.1, "b": 1.1, "c": 0.05, "d": 1.0})
    assert [line[2] for line in found[1:]] == [
        "**1.12 [1.0, 1.2]: missed**", "0.9 [0.8, 1.0]", "**6.1% [5, 7]: missed**", "-"
    ]  # fmt: skip
    assert found[0] == ["what", "bound", "median"] and found[1][1] == "at most 1.1"
    with pytest.raises(AssertionError, match="no line for"):
        tables.benchmarks.judged(rows, 1, "{:g}", {"e": 1.0})


def test_the_fastest_method_of_each_run_is_held_to_its_bound(tables, monkeypatch):
    def cell(method, speed, low, relaxed=False):
        return {"method": method, "DSR": speed, "DSR_spread": [low, 3.0], "relaxed": relaxed}

    runs = {0: {"cells": [cell("a", 2.5, 2.0), cell("b", 2.1, 1.0), cell("c", 9.0, 8.0, relaxed=True)]},
            1: {"cells": [cell("b", 1.9, 1.5)]}, 2: {"cells": [cell("a", 2.2, 1.05)]}}  # fmt: skip
    monkeypatch.setattr(tables.bounds, "evaluations", lambda recipe: runs)
    bound, said = tables.bounds._fastest("any", lambda cell: True, 2.0)
    assert bound == "2x, lower quartile above 1.1"
    assert said == "2.50x [2.00, 3.00], 1.90x [1.50, 3.00], 2.20x [1.05, 3.00] (a; b): **missed** by 2 of 3"
    del runs[1], runs[2]
    assert "missed" not in tables.bounds._fastest("any", lambda cell: True, 2.0)[1]


def test_chains_that_an_engine_drafts_as_we_do_are_summed(tables, monkeypatch):
    lines = [["target", "drafter", "prompts", "plain", "drafted", "chains", "accepted"]]
    lines += [["llava", "eagle", prompts, "4/4", "4/4", equal, "1, 1"]
              for prompts, equal in (("text", "5/6"), ("one picture", "7/9"), ("two pictures", "8/8"))]  # fmt: skip
    lines += [["llama", "eagle", "text", "4/4", "4/4", "3/3", "1, 1"]]
    own = [lines[0], *(["llava", "msd", prompts, "4/4", "4/4", "2/2", "1, 1"] for prompts in ("text", "three at once"))]
    monkeypatch.setattr(tables.benchmarks, "printed", lambda name: {"engines": lines, "engines-own": own}[name])
    assert tables.benchmarks.engines_served() == [
        ["drafter", "llava: text, pictures", "llama: text, pictures"], ["eagle", "5/6, 15/17", "3/3"],
        ["msd", "2/2", ""],
    ]  # fmt: skip


def test_tables_are_found_between_other_lines(tables, monkeypatch):
    lines = [
        "| a | b |",
        "| --- | --- |",
        "| 1 |  |",
        "[ERROR] a library",
        "| 2 | x |",
        "",
        "text",
        "| c |",
        "| --- |",
        "| 3 |",
    ]
    monkeypatch.setattr(tables.benchmarks, "kept", lambda name: {"output": lines})
    monkeypatch.setattr(tables.benchmarks, "all_kept", lambda: ["any"])
    assert tables.benchmarks.printed("any") == [["a", "b"], ["1", ""], ["2", "x"]]
    assert tables.benchmarks.printed("any", 1) == [["c"], ["3"]]


def test_runs_are_kept_by_seed_and_those_of_an_earlier_commit_go(results, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    results.record([run(tmp_path / "a", 0), run(tmp_path / "b", 1)])
    results.record([run(tmp_path / "c", 2)])
    kept = json.loads((tmp_path / "results" / "lvlm.json").read_text())
    assert list(kept) == ["0", "1", "2"]
    evaluation = kept["0"]["evaluations"]["evaluate"]
    assert evaluation["binding"] == {"accuracy": 0.75} and evaluation["about"]["date"] == "2026-11-26"
    (cell,) = evaluation["cells"]
    assert cell["tau"] == 4.12346 and "accepted_histogram" not in cell

    results.record([run(tmp_path / "d", 1, commit="b" * 40)])
    assert list(json.loads((tmp_path / "results" / "lvlm.json").read_text())) == ["1"]


def test_differences_drafters_and_how_sure_the_target_is_are_kept(results, tmp_path):
    one = {"difference": 0.5, "interval": (0.1, 0.9), "verdict": "above 0", "requests": 12}
    compared = {"each": {"a - b": 0.5}, "mean": 0.5, "interval": (0.1, 0.9), "verdict": "above 0", "why": []}
    sure = {"pictures": 8, "target_top1": 0.46, "target_top10": 0.9, "first_draft_exact": 0.2, "ranks": [1, 2],
            "first_draft_lantern": [[0.2, 0.3], [0.4, 0.5]], "places": {"flat": {"share": 0.5}}}  # fmt: skip
    rows = [a_row(drafter=name, accepted=(n, n), benchmark="text") for name, n in (("draft", 3), ("draft_1", 1))]
    by_drafter = drafters_table(placed(frame(rows)))
    more = {
        "contrasts": [{"name": "rule", "mode": "", "place": "captions, T = 1", "result": one}],
        "comparison": {"text": compared | {"target_says_the_data": 0.02}},
        "tables": [asdict(by_drafter)],
        "sections": [{"name": "analysis", "data": {"1": sure}}],
    }
    _, kept = results.recorded(run(tmp_path / "a", 0, more=json.loads(json.dumps(more))))
    evaluation = kept["evaluations"]["evaluate"]
    assert evaluation["contrasts"] == [
        {"name": "rule", "mode": "", "place": "captions, T = 1", "difference": 0.5, "interval": [0.1, 0.9]}
    ]
    assert evaluation["comparison"]["text"]["each"] == {"a - b": 0.5} and "why" not in evaluation["comparison"]["text"]
    assert [(line["drafter"], line["method"], line["tau"]["text"][0]) for line in evaluation["by_drafter"]] == [
        ("draft", "M", 4.0), ("draft_1", "M", 2.0)
    ]  # fmt: skip
    kept = evaluation["analysis"]["1"]
    assert kept["first_draft_lantern"] == 0.5 and kept["places"] == {"flat": {"share": 0.5}} and "ranks" not in kept


def test_rows_and_columns_of_pictures_are_labelled_where_their_number_fits(results, tmp_path, monkeypatch):
    figures, sheet, methods = importlib.import_module("result_figures"), tmp_path / "sheet.png", ("plain decoding", "A")
    prompts, kept, save = ("a red ball", 'a <b> & a "c" that is long', "it"), [], figures.save
    save_grid(sheet, torch.zeros(6, 3, 8, 8, dtype=torch.uint8), columns=3)
    grids = [PictureGrid("sheet.png", "Pictures.", methods, prompts)] * 2  # of two temperatures
    (tmp_path / "report.html").write_text(html_page("a", grids, tmp_path))
    shown = figures.prompts_of(sheet, methods[0])
    assert shown == [*prompts, *prompts]
    monkeypatch.setattr(figures, "save", lambda figure, path: (kept.append(figure), save(figure, path)))
    figures.label_sheet(sheet, methods, shown, tmp_path / "labelled.png")
    (panel,) = kept[0].axes
    above, beside = ([label.get_text() for label in axis.get_ticklabels()] for axis in (panel.xaxis, panel.yaxis))
    assert [" ".join(text.split("\n")) for text in above] == [*prompts] and beside == [*methods]
    assert Image.open(tmp_path / "labelled.png").width > Image.open(sheet).width
    with pytest.raises(UserError, match="5 methods do not divide its height"):
        figures.label_sheet(sheet, list("abcde"), shown, tmp_path / "other.png")
    with pytest.raises(UserError, match="2 prompts are known of its 3 columns"):
        figures.label_sheet(sheet, methods, shown[:2], tmp_path / "other.png")


def test_what_is_drawn_of_recorded_runs_stays_within_its_bounds(results, tmp_path, monkeypatch):
    """Bars of tau reached below 1, which none can have, and the highest mark lay half behind the edge of its panel."""
    figures, kept = importlib.import_module("result_figures"), []
    monkeypatch.setattr(figures, "save", lambda figure, path: kept.append(figure))
    figures.compare(tmp_path / "a.png", figures.compared())
    bars = [segment for part in kept[0].axes[0].collections for segment in part.get_segments()]
    assert bars and min(segment[:, 0].min() for segment in bars) == 1.0
    figures.video(tmp_path / "b.png")
    for panel in kept[1].axes:
        highest = max(line.get_ydata().max() for line in panel.lines if len(line.get_xdata()) == 3)
        assert panel.get_ylim()[1] >= 1.05 * highest


@pytest.mark.parametrize("state", [{"changed": 3}, {"commit": None}])
def test_a_run_of_code_that_no_commit_has_is_refused(results, tmp_path, state):
    with pytest.raises(UserError, match="its code is not that of a commit"):
        results.record([run(tmp_path / "a", 0, **state)])


def test_a_run_that_measured_nothing_is_refused(results, tmp_path):
    folder = run(tmp_path / "a", 0)
    (folder / "evaluate" / "report.json").unlink()
    with pytest.raises(UserError, match="nothing was measured here"):
        results.record([folder])
