"""scripts/minutes.py: every training of a recipe for as many CPU minutes, with the steps that fit."""

import json

import pytest
import yaml
from draftsmith.recipes.config.load import load
from draftsmith.scripts import minutes


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """What was run in a folder where 5 steps take 60 CPU seconds, and 25 take 80: a second a step. Its evaluations have
    a tau of 1 more for twice the minutes, and half of one more for each training behind the first.
    """
    calls = []

    def run(path, stages, settings):
        calls.append((*stages, *settings[1:]))
        tree = yaml.safe_load(path.read_text())["stages"]
        for name in stages:
            if name.startswith("chains"):
                names = [method for method in tree[name]["methods"] if "tree" not in method]
                taus = [(n, int(name[7:]) / 2 + 0.5 * place) for place, n in enumerate(names)]
                cells = [{"method": n, "tau": tau, "tau_interval": [tau - 1, tau + 1]} for n, tau in taus]
                (tmp_path / name).mkdir(exist_ok=True)
                (tmp_path / name / "report.json").write_text(json.dumps({"cells": cells}))
        return 80.0 if stages[0].endswith("_25_steps") else 60.0

    monkeypatch.setattr(minutes, "run", run)
    return calls


def test_each_training_gets_the_steps_that_fit(tmp_path, ran, capsys):
    """The recipe that comes out loads. Steps are timed once, and an evaluation of more methods is made anew."""
    words = ["--output", str(tmp_path), "--recipes", "ours", "speculators", "--minutes", "2", "4", "--seeds", "0", "1"]
    minutes.main(words)
    path = tmp_path / "minutes.yaml"
    stages = yaml.safe_load(path.read_text())["stages"]
    assert stages["speculators_2_1"]["steps"] == 120 and stages["ours_4_0"]["steps"] == 240
    assert stages["ours_4_1"]["seed"] == 1
    assert stages["chains_4"]["contrasts"] == {"ours less speculators": ["ours", "speculators"]}
    evaluated = load([f"recipe={path}"]).recipe.stages["chains_2"]
    assert evaluated.methods["speculators, tree of 24"].drafters == ["speculators_2_0", "speculators_2_1"]
    timed = [f"{name}_{steps}_steps" for name in ("ours", "speculators") for steps in (5, 25)]
    assert [call[0] for call in ran][:5] == ["prompts", *timed]
    shown = capsys.readouterr().out
    assert "| ours | 1.00 [0.00, 2.00] | 2.00 [1.00, 3.00] | 4.0 |" in shown
    assert "| speculators | 1.50 [0.50, 2.50] | 2.50 [1.50, 3.50] | 2.8 |" in shown, "half way between 2 and 4 minutes"
    with pytest.raises(SystemExit, match="2"):
        minutes.main([*words, "--rates", "our=2e-3"])
    assert "smollm2/minutes trains no our: ours, speculators" in capsys.readouterr().err
    ran.clear()
    minutes.main([*words, "--rates", "ours=2e-3"])
    again = [call for call in ran if len(call) > 1 and call[1].startswith("restart=")]
    assert again == [("chains_2", "restart=chains_2"), ("chains_4", "restart=chains_4")]
    assert not any("_steps" in call[0] for call in ran)
    assert yaml.safe_load(path.read_text())["stages"]["ours-2e-3_2_0"]["optim"]["lr"] == 2e-3
