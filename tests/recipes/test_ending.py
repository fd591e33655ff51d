"""What a run says at its end: a table that fits, the report's path, and commands that exist."""

import json
import shlex

import pytest
import yaml
from draftsmith.eval.report import build, write
from draftsmith.recipes.commands.cli import COMMANDS
from draftsmith.recipes.config import ending as module
from draftsmith.recipes.config.ending import ending, try_next
from draftsmith.recipes.config.files import recipe_names
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from recorded import first_of_each_folder
from rows import METHODS, measured_rows


def loaded(name, *words):
    found = load([f"recipe={name}", *words])
    return found.recipe, found.path, list(found.recipe.stages)


@pytest.mark.parametrize("name", recipe_names())
def test_every_command_that_is_offered_exists_and_parses(name, tmp_path):
    recipe, path, stages = loaded(name, f"output={tmp_path}/a run")
    offered = try_next(recipe, path, stages)
    assert 1 <= len(offered) <= 3
    for command, what in offered:
        program, called, *words = shlex.split(command)
        assert program == "draftsmith" and what
        options = COMMANDS[called].parse(words)
        if called == "recipes":
            assert options.words == ["demo"]
        elif called == "compare":
            assert options.runs == [f"{tmp_path}/a run"]
        elif called == "publish":
            assert options.name == f"{tmp_path}/a run"
        else:
            raise AssertionError(called)


@pytest.mark.parametrize("name", first_of_each_folder())
def test_publish_plans_where_it_is_offered(name, tmp_path):
    """As `draftsmith publish RUN` does: the run's own recipe with a stage of this kind."""
    found = load([f"recipe={name}", f"output={tmp_path}/a run"])
    commands = [command for command, _ in try_next(found.recipe, found.path, list(found.recipe.stages))]
    offered = next((shlex.split(command) for command in commands if " publish " in command), None)
    if offered is None:
        return
    tree = tmp_path / "recipe.yaml"
    tree.write_text(yaml.safe_dump(found.tree, sort_keys=False))
    settings = [f"stages.published.{setting}" for setting in offered[3:]]
    again = load([f"recipe={tree}", "stages.published={kind: publish}", *settings])
    assert plan(again.recipe, again.path)[-1].name == "published"


def test_only_a_drafter_that_ran_is_offered():
    recipe, path, _ = loaded("demo/compare")
    offered = [command for command, _ in try_next(recipe, path, ["eagle3", "evaluate"]) if " publish " in command]
    assert [command.rpartition(" ")[2] for command in offered] == ["from=eagle3"]


def test_the_end_of_a_run(tmp_path, monkeypatch):
    recipe, path, stages = loaded("demo/lvlm", f"output={tmp_path}")
    assert ending(recipe, path, stages) == "", "nothing is measured yet"
    write(tmp_path / "evaluate", build(measured_rows(), about={}, methods=METHODS), measured_rows())
    assert ending(recipe, path, ["world"]) == "", "nor by the stages that ran"
    lines = ending(recipe, path, stages).splitlines()
    heading = "measured on method temperature n tau [95%] decoding end to end same tokens as plain"
    assert lines[1] == "evaluate" and " ".join(lines[2].split()) == heading
    assert [line.split() for line in lines[4:7]] == [
        ["pictures", "M", "0", "6", "2.53", "[2.23,", "2.86]", "1.55x", "1.51x", "6/6"],
        ["pictures", "T", "0", "6", "2.44", "[1.64,", "3.10]", "1.52x", "1.46x", "6/6"],
        ["pictures", "EAGLE", "0", "6", "2.67", "[2.29,", "3.08]", "1.37x", "1.33x", "6/6"],
    ]
    end = lines.index(f"report: {tmp_path}/evaluate/report.html (report.md says the same)")
    assert lines[end + 2] == "try next:" and lines[end + 3].startswith(f"  draftsmith compare {tmp_path}  ")
    assert lines[end + 5].split("  ")[1] == "draftsmith recipes demo"
    (tmp_path / "evaluate" / "examples.txt").write_text("best\nWhat?\nA \x1b[32mred\x1b[0m one.")
    for no_color, is_watched, red in (("", False, "[red]"), ("", True, "\x1b[32mred\x1b[0m"), ("1", True, "[red]")):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setattr(module, "watched", lambda is_watched=is_watched: is_watched)
        assert ending(recipe, path, stages).splitlines()[end + 4] == f"A {red} one."
    monkeypatch.setattr(module, "MOST_LINES", 4)
    shorter = ending(recipe, path, stages).splitlines()
    row, end = shorter.index(lines[7]), shorter.index("2 more lines in the report")
    assert lines[8] not in shorter and row < end and shorter[end + 1].startswith("report: ")
    report = tmp_path / "evaluate" / "report.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"cells": []}))
    assert ending(recipe, path, stages).splitlines()[0].startswith("report: "), "no table without a row"
    report.write_text("{")
    assert "not valid JSON" in ending(recipe, path, stages), "a run that is over does not fail by its last lines"
