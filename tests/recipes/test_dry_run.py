"""Full-size recipes load, validate and count right without a network."""

import pytest
from draftsmith.recipes.cli import main


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("llava15-68m", ["68,128,512", "1,377,792", "7,063,427,072", "steps 5,198", "steps 2,181"]),
        ("llava15-160m", ["162,515,712", "1,377,792", "steps 5,198"]),
        ("demo/lvlm", ["19700 records", "steps 800"]),
    ],
)
def test_counts(recipe, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([f"recipe={recipe}", "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    for number in expected:
        assert number in shown
    assert list(tmp_path.iterdir()) == []
