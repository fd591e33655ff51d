"""Mixtures of the package: read under data/NAME.yaml where the user has none, with the user's files behind them."""

import json
import shutil
from pathlib import Path

import pytest
from draftsmith.data.records import patterns
from draftsmith.data.records.mixture import Selection, are_present, expand, identities, missing_files, missing_hint
from fails import fails_with
from small_records import talk

NAME = "data/sharegpt-68k.yaml"
FILE = "data/ShareGPT/ShareGPT_V4.3_unfiltered_cleaned_split.json"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder where a run starts, without data."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def records(path: Path, count: int) -> None:
    turns = talk("Which?", "The first.")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([{"id": f"t{n}", "conversations": turns} for n in range(count)]))


def test_what_is_missing_is_the_file_behind_it_with_the_command_that_fetches_it(place):
    assert not are_present([NAME]) and missing_files([NAME]) == [FILE]
    fetch = missing_hint([NAME])
    assert fetch.startswith("hf download Aeala/ShareGPT") and fetch.endswith(f"--local-dir {Path(FILE).parent}")
    refused = fails_with("1 of 1 data files", expand, [NAME])
    assert FILE in refused.where and refused.hint == fetch


def test_relative_paths_start_where_the_recipe_names_it(place):
    records(place / FILE, 5)
    assert are_present([NAME])
    (share,) = expand([NAME])
    assert (share.source.path, share.strategy) == (Path(FILE), "random:68000")
    assert len(Selection([NAME], cache=place / "cache", seed=42).places()) == 5


def test_a_file_of_the_users_wins_and_other_places_are_not_looked_up(place):
    records(place / FILE, 5)
    (place / NAME).write_text("datasets:\n- {json_path: own.json}\n")
    assert missing_files([NAME]) == ["data/own.json"] and missing_hint([NAME]) is None
    (place / NAME).unlink()
    for name in ("sharegpt-68k.yaml", str(place / NAME), "elsewhere/data/sharegpt-68k.yaml", "data/sharegpt.yaml"):
        assert not are_present([name]) and missing_hint([name]) is None
        fails_with("mixture not found", expand, [name])


def test_the_record_of_a_stage_follows_what_it_says_and_not_its_comments(place, monkeypatch):
    records(place / FILE, 5)
    before = identities([NAME])
    assert len(before) == 2 and "absent" not in before
    own = Path(shutil.copytree(patterns.FOLDER, place / "mixtures"))
    monkeypatch.setattr(patterns, "FOLDER", own)
    text = (own / "sharegpt-68k.yaml").read_text()
    (own / "sharegpt-68k.yaml").write_text("# Of a later version.\n" + text)
    assert identities([NAME]) == before
    (own / "sharegpt-68k.yaml").write_text(text.replace("68000", "68001"))
    assert identities([NAME])[0] != before[0] and identities([NAME])[1] == before[1]
