"""Runs side by side: every track's report in one shape, what differs, curves with torn lines, and the page."""

import json
import re

import pytest
import yaml
from command_line import prints
from draftsmith.core.results import DONE, Mark, sums_of, write_mark
from draftsmith.eval.run_reports import read_run, read_runs
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.commands.comparison import (
    differences,
    panels,
    training_rows,
)
from fails import fails_with
from rows import report_of


def run(folder, name="a", *, recipe=None, lines=(), report=None):
    stage = folder / name / "finetune"
    stage.mkdir(parents=True)
    if recipe is not None:
        (folder / name / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    if lines:
        (stage / "metrics.jsonl").write_text("\n".join(lines))
    if report is not None:
        (folder / name / "evaluate").mkdir()
        (folder / name / "evaluate" / "report.json").write_text(json.dumps(report))
    return folder / name


def line(step, **values):
    return json.dumps({"step": step, "time": 1.0, **values})


@pytest.fixture
def two(tmp_path):
    optim = {"lr": 1e-3}
    stages = {"finetune": {"kind": "train", "optim": optim}, "evaluate": {"kind": "evaluate"}}
    first = {"seed": 0, "output": "runs/a", "stages": stages}
    second = {"seed": 0, "output": "runs/b",
              "stages": {"finetune": {"kind": "train", "optim": {"lr": 5e-4}, "steps": 9}}}  # fmt: skip
    lines = [line(10, loss=2.0, lr=1e-3, samples_per_s=9.0), line(20, loss=1.5, samples_per_s=11.0),
             line(20, val_loss=1.8)]  # fmt: skip
    a = run(tmp_path, "a", recipe=first, lines=lines, report=report_of())
    torn = [line(10, loss=2.5), '{"step": 20, "lo', "", line(30, loss=float("nan")), line(40, loss=1.25, shown="a.png")]
    return a, run(tmp_path, "b", recipe=second, lines=torn)


def test_what_differs_and_what_does_not(two):
    runs = read_runs(two)
    assert [r.name for r in runs] == ["a", "b"]
    assert dict(differences(runs)) == {"stages.finetune.optim.lr": ["0.001", "0.0005"],
                                       "stages.evaluate": ['"evaluate"', "-"],
                                       "stages.finetune.steps": ["-", "9"]}  # fmt: skip
    # Training is told by its last and best numbers.
    assert training_rows(runs) == [["finetune", "steps", "20", "40"], ["finetune", "loss (last)", "1.5000", "1.2500"],
                                   ["finetune", "val_loss (best)", "1.8000", "-"],
                                   ["finetune", "samples/s (median)", "10.0", "-"]]  # fmt: skip


def test_a_seed_that_is_not_written_is_the_default_one(two):
    """`draftsmith demo lvlm` beside `seed=1`: the line read `- | 1`."""
    for place, seed in zip(two, (None, 1), strict=True):
        recipe = yaml.safe_load((place / "recipe.yaml").read_text())
        recipe |= {"seed": seed}
        (place / "recipe.yaml").write_text(yaml.safe_dump({k: v for k, v in recipe.items() if v is not None}))
    assert dict(differences(read_runs(two)))["seed"] == ["0", "1"]
    (two[0] / "recipe.yaml").unlink()
    assert dict(differences(read_runs(two)))["seed"] == ["-", "1"], "nothing tells the seed of a run without a recipe"


def test_a_line_that_is_torn_or_not_finite_is_no_point(two):
    (_, lines), *_ = [panel for panel in panels(read_runs(two)) if ": loss" in panel[0]]
    assert lines == {"a": [(10, 2.0), (20, 1.5)], "b": [(10, 2.5), (40, 1.25)]}


def test_old_results_that_were_kept_aside_are_not_compared(tmp_path):
    folder = run(tmp_path, lines=[line(1, loss=1.0)])
    (folder / "finetune").rename(folder / "finetune.before-1")
    fails_with("nothing was trained or measured", read_run, folder, "a")


@pytest.mark.parametrize(("file", "text"), [("recipe.yaml", "a: [1"), ("evaluate/report.json", '{"tables": ')])
def test_a_file_that_cannot_be_read_is_named(file, text, two):
    (two[0] / file).write_text(text)
    assert fails_with("", read_run, two[0], "a").where == str(two[0] / file)


def test_a_report_that_is_not_as_its_stage_wrote_it_is_named(two):
    stage = two[0] / "evaluate"
    write_mark(stage / DONE, Mark("f", files=sums_of(stage, ["report.json"])))
    assert read_run(two[0], "a").evaluations
    report = (stage / "report.json").read_text()
    (stage / "report.json").write_text(report.replace("1", "2", 1))
    fails_with(r"report\.json of stage evaluate was changed after it was written", read_run, two[0], "a")


def test_the_command_writes_page_data_and_curves(two, tmp_path, capsys):
    output = tmp_path / "out"
    said = prints(capsys, ["compare", *map(str, two), "--output", str(output)])
    assert said.index("Leaderboard: pictures") < said.index("Settings that differ"), "the leaderboard comes first"
    assert said.startswith(f"written: {output / 'compare.html'}, "), "it stood below 60 lines"
    head, rule, first, *_ = said[said.index("Leaderboard: pictures") :].splitlines()[1:]
    assert not {"<u>", "**", "|", "#"} & {*re.findall(r"</?u>|[*]{2}|[|]|#", said)}, "no Markdown in a terminal"
    assert head.startswith("run  method") and set(rule) == {"-", " "} and head.index("method") == first.index("M")
    assert (output / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "curves.png" in (output / "compare.md").read_text()
    data = json.loads((output / "compare.json").read_text())
    board = data["tables"][0]
    assert data["runs"] == ["a", "b"] and board["rows"][0][:4] == ["a", "M", 12, [4.096, 3.9, 4.3]]
    page = (output / "compare.html").read_text()
    assert "Leaderboard: pictures" in page and "data:image/png;base64," in page and 'src="curves' not in page
    assert main(["compare", str(two[0]), str(two[0])]) == 2
    assert main(["compare", str(two[0]), "--output", str(two[0])]) == 2
    assert not (two[0] / "compare.md").exists()
