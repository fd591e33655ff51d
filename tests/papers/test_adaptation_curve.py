"""The curve of adaptation: which heads a run has, what each share is of, and that both come from rows and recipe."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
from draftsmith.core.errors import UserError
from draftsmith.eval.measured_rows import write_rows
from draftsmith.eval.tables import markdown
from draftsmith.recipes.load import load
from rows import a_row

POINTS = {"old": 0, "fortieth": 37, "twentieth": 75, "tenth": 150, "adapted": 300, "short": 300, "fresh": 1500}


@pytest.fixture(scope="module")
def script():
    name = "adaptation_curve"
    loader = SourceFileLoader(name, str(Path(__file__).parents[2] / "scripts" / "papers" / f"{name}.py"))
    module = module_from_spec(spec_from_loader(name, loader))
    sys.modules[name] = module  # its dataclass looks itself up
    loader.exec_module(module)
    return module


def measured():
    """Two requests of every head of the recipe: in two cycles each, more tokens for longer trainings."""
    rows = []
    for number, name in enumerate(POINTS):
        for seed, drafter in enumerate((name, f"{name}_1", f"{name}_2")):
            for request, more in (("a", 0), ("b", 1 + seed)):
                rows.append(
                    a_row(request=request, drafter=drafter, method="chain", accepted=(number, number + more), gamma=9)
                )
    return rows


def test_every_head_of_the_demo_has_its_place_and_its_share(script):
    recipe = load(["recipe=demo/adapt"]).recipe
    heads = script.heads_of(recipe, script.measured(measured()))
    assert {(h.arm, h.steps, h.seed) for h in heads} == {
        (script.FRESH if name in ("short", "fresh") else script.ADAPTED, steps, seed)
        for name, steps in POINTS.items() for seed in range(3)
    }  # fmt: skip
    taus = {(h.arm, h.steps, h.seed): h.tau for h in heads}
    assert taus[script.ADAPTED, 0, 0] == 5 / 4 and taus[script.FRESH, 1500, 2] == 31 / 4
    lines = "\n".join(markdown(script.table(heads))).rstrip().splitlines()
    assert len(lines) == 2 + len(POINTS) and lines[0].count("| seed ") == 3
    adapted = next(line for line in lines if line.startswith("| adapted | 300 (20.0%)"))
    shares = [(21 + seed) / (29 + seed) for seed in range(3)]
    assert ", ".join(f"{share:.1%}" for share in shares) in adapted and f"{sum(shares) / 3:.1%} |" in adapted


def test_a_run_is_read_and_drawn(script, tmp_path, monkeypatch, capsys):
    whole = load(["recipe=demo/adapt"])
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "recipe.yaml").write_text(whole.path.read_text())
    write_rows(tmp_path / "evaluate" / "rows.jsonl", measured())
    monkeypatch.setattr(sys, "argv", ["scripts/papers/adaptation_curve.py", str(tmp_path)])
    script.main()
    assert "| from scratch | 1,500 (100.0%) |" in capsys.readouterr().out
    assert (tmp_path / "evaluate" / "adaptation.png").stat().st_size > 5_000
    lvlm = load(["recipe=demo/lvlm"]).recipe
    with pytest.raises(UserError, match="no stage goes on from a head"):
        script.heads_of(lvlm, script.measured(measured()))
