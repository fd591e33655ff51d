"""Tables of the pages that show what demos measured: written from docs/results (scripts/results.py)."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from fails import fails_with

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
def recording(results):
    return importlib.import_module("record_results")


def run(folder, seed, commit="a" * 40, changed=0, more=None):
    (folder / "evaluate").mkdir(parents=True)
    about = {"recipe": "lvlm.yaml", "git": {"commit": commit, "changed_files": changed}}
    (folder / "run.yaml").write_text(yaml.safe_dump(about))
    report = {
        "about": {"seed": seed, "device": "CPU", "date": "2026-11-26", "torch": "2.13.0", "command": "..."},
        "binding": {"accuracy": 0.75}, "findings": ["..."], "cells": [CELL], "tables": [], "sections": [],
    }  # fmt: skip
    (folder / "evaluate" / "report.json").write_text(json.dumps(report | (more or {})))
    return folder


def test_every_page_has_the_tables_of_what_was_measured(results):
    assert results.main(["check"]) == 0, "scripts/results.py write, and read what it changed"


def test_a_changed_number_in_a_page_is_named_and_written_anew(results, tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    text = (ROOT / "README.md").read_text()
    cut = text.index("x |", text.index("<!-- results: emoji-vlm -->"))
    page.write_text(text[: cut - 1] + "9" + text[cut:])
    monkeypatch.setattr(results, "pages", lambda: [page])
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results.main(["check"]) == 1 and capsys.readouterr().out == "README.md\n"
    assert results.main(["write"]) == 0 and page.read_text() == text
    assert results.main(["check"]) == 0


@pytest.mark.parametrize("end", ["\n", "\n\nMore.\n"])
def test_a_mark_without_a_table_gets_one(results, end):
    """A page that ended with its mark had no table, and the check found nothing missing."""
    page = results.rewritten(f"# A page\n\n<!-- results: runs -->{end}")
    assert page.count("\n| `demo/lvlm` |") == 1 and page.endswith(end[1:] or " |\n") and results.rewritten(page) == page


def test_every_table_is_on_a_page(results):
    marked = re.findall(r"^<!-- results: (.+) -->$", "\n".join(page.read_text() for page in results.pages()), re.M)
    assert set(results.TABLES) == set(marked)


def test_no_place_of_a_machine_is_kept():
    for path in (ROOT / "docs" / "results").rglob("*.json"):
        assert re.findall(r"(?<![\w.:/<])/(?:[\w.-]+/)+[\w.-]*", path.read_text()) == [], path.name


def test_runs_are_kept_by_seed_and_those_of_an_earlier_commit_go(recording, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(recording, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    recording.record([run(tmp_path / "a", 0), run(tmp_path / "b", 1)])
    recording.record([run(tmp_path / "c", 2)])
    kept = json.loads((tmp_path / "results" / "lvlm.json").read_text())
    assert list(kept) == ["0", "1", "2"]
    evaluation = kept["0"]["evaluations"]["evaluate"]
    assert evaluation["binding"] == {"accuracy": 0.75} and evaluation["about"]["date"] == "2026-11-26"
    (cell,) = evaluation["cells"]
    assert cell["tau"] == 4.12346 and "accepted_histogram" not in cell

    recording.record([run(tmp_path / "d", 1, commit="b" * 40)])
    assert list(json.loads((tmp_path / "results" / "lvlm.json").read_text())) == ["1"]


@pytest.mark.parametrize("state", [{"changed": 3}, {"commit": None}, "nothing"])
def test_a_run_without_a_commit_or_a_report_is_refused(recording, tmp_path, state):
    folder = run(tmp_path / "a", 0, **({} if state == "nothing" else state))
    if state == "nothing":
        (folder / "evaluate" / "report.json").unlink()
    fails_with(r"nothing was measured here|its code is not that of a commit", recording.record, [folder])
