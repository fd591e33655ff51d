"""Runs of one recipe with several seeds: what counts as one recipe, and the spread that is shown."""

import json

import pytest
import yaml
from draftsmith.eval.run_reports import read_runs
from draftsmith.recipes.commands.comparison import over_seeds
from rows import REPORTED


def run(folder, seed, *cells, **settings):
    (folder / "evaluate").mkdir(parents=True)
    recipe = {"seed": seed, "output": str(folder), "stages": {"evaluate": {"kind": "evaluate"}}} | settings
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    report = {"version": 2, "about": {}, "cells": [REPORTED | cell for cell in cells]}
    (folder / "evaluate" / "report.json").write_text(json.dumps(report))
    return folder


def test_a_run_that_names_no_seed_has_the_default_one(tmp_path):
    default, second = run(tmp_path / "a", None, {}), run(tmp_path / "b", 1, {"tau": 5.0})
    recipe = yaml.safe_load((default / "recipe.yaml").read_text())
    del recipe["seed"]  # as a run writes it whose command says nothing of seeds
    (default / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (table,) = over(default, second)
    assert table.title.startswith("Over seeds 0, 1: ") and table.column("tau of each seed") == ["4.00, 5.00"]
    assert table.column("tau [95%]") == [None], "Student's interval of two would reach below 1"


def over(*folders):
    return over_seeds(read_runs(folders))


def test_mean_and_students_interval_of_three_seeds(tmp_path):
    # In the order of the seeds, whatever the order of the folders.
    runs = [run(tmp_path / str(seed), seed, {"tau": tau, "DSR": speed, "identical": same})
            for seed, tau, speed, same in ((2, 5.0, 2.0, 11), (0, 3.0, 1.5, 12), (1, 4.0, 1.0, 12))]  # fmt: skip
    (table,) = over(*runs)
    assert table.title == "Over seeds 0, 1, 2: pictures, T 0, 64 new tokens"
    ((method, taus, tau, speeds, speed, same),) = table.rows
    assert (method, taus, speeds, same) == ("M", "3.00, 4.00, 5.00", "1.50x, 1.00x, 2.00x", (35, 36))
    half = 4.303 * 1.0 / 3**0.5  # Student's t for two degrees of freedom, standard deviation 1
    assert tau == pytest.approx((4.0, 4.0 - half, 4.0 + half)) and speed == (1.5, 1.0, 2.0)


def test_another_setting_is_another_recipe_and_one_seed_has_no_spread(tmp_path):
    a, b = run(tmp_path / "a", 0, {}), run(tmp_path / "b", 1, {}, precision="bf16")
    assert over(a, b) == [] and over(a) == []
    again = run(tmp_path / "c", 0, {"tau": 1.0})
    assert over(a, again) == [], "the same seed twice says nothing about others"
    assert len(over(a, b, run(tmp_path / "d", 2, {}))) == 1


def test_only_what_every_seed_has_measured_is_averaged(tmp_path):
    first = run(tmp_path / "a", 0, {"method": "M"}, {"method": "T"}, {"benchmark": "text"})
    second = run(tmp_path / "b", 1, {"method": "M"}, {"method": "C", "temperature": 1.0})
    (table,) = over(first, second)
    assert table.column("method") == ["M"]
