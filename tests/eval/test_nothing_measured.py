"""Every answer ended with its first token: no cycle was run, so no place that prints a ratio may print a number."""

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from draftsmith.eval.policies import StaticTree
from draftsmith.eval.report import build, write
from draftsmith.eval.run_reports import cells, overview, read_runs
from draftsmith.eval.tables import for_terminal, markdown
from draftsmith.recipes.commands import comparison
from draftsmith.recipes.commands.comparison import boards, entries, over_seeds
from draftsmith.trainers.publish.card import read_evaluation
from draftsmith.trainers.train.drafter import TrainedDrafter
from fails import fails_with

from .rows import METHODS, empty_row, random_rows


def empty_rows(**changes):
    values = {"stop": "eos", "drafter": "finetune", "mode": "M"} | changes
    return [empty_row(request=f"r{n}", **values) for n in range(3)]


def a_run(folder: Path, rows, *, seed=0) -> dict:
    """A run's folder with the report of some rows, and what report.json holds."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"seed: {seed}\nstages: {{evaluate: {{kind: evaluate}}}}\n")
    about = {"target": "tiny", "device": "CPU"}
    write(folder / "evaluate", build(rows, about=about, methods=METHODS), rows)
    return json.loads((folder / "evaluate/report.json").read_text())


def columns(table, *names):
    """The first line's values under the headings that begin so."""
    return [value for column, value in zip(table.columns, table.rows[0], strict=True) if column.name.startswith(names)]


@pytest.fixture
def report(tmp_path):
    return a_run(tmp_path / "a", empty_rows())


def test_the_report_has_dashes_and_asks_about_the_template(report, tmp_path):
    text, page = ((tmp_path / "a/evaluate" / name).read_text() for name in ("report.md", "report.html"))
    assert "**Nothing was measured**" in text and "every answer was empty" in text and "Is the template right?" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| photos | M | 3 | 3/3 |")]
    # End to end there is time without a cycle, and a share of it is the prefill's.
    assert line == "| photos | M | 3 | 3/3 | - | - | - | - | - | - | - | 1.00x [1.00, 1.00] | 100% |"
    for shown in (text, page):
        assert not re.search(r"\b0\.00x|\bnan\b|best DSR|Best tau|identical to plain decoding", shown, re.IGNORECASE)
    assert "NaN" not in (tmp_path / "a/evaluate/report.json").read_text()
    (cell,) = report["cells"]
    assert cell["tau"] is None and cell["DSR"] is None and cell["tau_interval"] == [None, None] and cell["calls"] == 0
    assert not (tmp_path / "a/evaluate/acceptance.png").exists()


def test_the_terminal_the_card_and_the_comparison_have_dashes(report, tmp_path):
    assert for_terminal(overview(cells(report)))[3].split()[4:] == ["-", "-", "1.00x", "3/3"]
    assert columns(overview(cells(report)), "tau", "decoding") == [None, None] and cells(report)[0].tau is None
    runs = read_runs([tmp_path / "a"])
    assert "nan" not in comparison.markdown(runs, comparison.tables_of(runs))
    found = entries(runs)
    (board,) = boards(found)
    assert columns(board, "tau", "expected", "measured") == [None, None, None]
    assert any(note.startswith("Dashes of a, M: no cycle was run") for note in board.footnotes)
    card = read_evaluation(tmp_path / "a/evaluate", "finetune")
    assert "Nothing was measured" in card.headline and "| - | - |" in "\n".join(card.table)


def test_seeds_of_which_one_measured_nothing_have_no_mean(tmp_path):
    a_run(tmp_path / "a", random_rows(4, drafter="finetune"), seed=1)
    a_run(tmp_path / "b", empty_rows(), seed=2)
    a_run(tmp_path / "c", random_rows(4, seed=3, drafter="finetune"), seed=3)
    runs = read_runs([tmp_path / name for name in "abc"])
    for run in runs:
        run.settings["stages.evaluate.kind"] = "evaluate"
    (table,) = over_seeds(runs)
    assert columns(table, "tau [", "measured [") == [None, None]
    assert [str(value).split(", ")[1] for value in columns(table, "tau of", "measured in")] == ["-", "-"]


def test_differences_of_nothing_are_not_told(tmp_path):
    rows = [row for name in ("a", "b") for mode in "MT" for row in empty_rows(drafter=name, method=mode, mode=mode)]
    report = build(rows, about={}, methods=METHODS, contrasts={"a change": ("a", "b")})
    (table,) = [table for table in report.tables if table.title.startswith("Effect")]
    assert table.rows[0][2] is None and "nan" not in "\n".join(markdown(table))
    write(tmp_path, report, rows)
    assert json.loads((tmp_path / "report.json").read_text())["contrasts"][0]["result"]["verdict"] == "not measured"


def test_a_decoding_check_of_nothing_stops_where_the_best_tau_is_to_be_chosen():
    """At its first check, and not at the end of all training."""
    said: list[str] = []
    stop = SimpleNamespace(together=contextlib.nullcontext, watch=lambda places, where: [*places])
    context = SimpleNamespace(name="head", say=said.append, seed=0, stop=stop)
    decoding = SimpleNamespace(tree=StaticTree(kind="static", choices=[[0]]), top_k=0, top_p=1.0)
    requests = SimpleNamespace(
        temperatures=(0.0,), grid=None, max_new_tokens=4, eos_ids=(), count=0, keep=lambda *arguments: {}
    )
    trained = SimpleNamespace(
        stage=SimpleNamespace(select="last", decoding=decoding), context=context, requests=requests, target=None,
        config=SimpleNamespace(drafter=lambda module, target: None), _copy=lambda engine: None,
    )  # fmt: skip
    assert TrainedDrafter.decode(trained, None, 1) == {}
    assert "is the template right?" in said[0]
    trained.stage.select = "tau"
    caught = fails_with("tau was not measured", TrainedDrafter.decode, trained, None, 1)
    assert caught.key == "stages.head.select"
