"""Tables and tars in a recipe's data sections: mistakes, fingerprints, a dry run, and `draftsmith check`."""

import json
import re
from pathlib import Path

import datasets
import pytest
from command_line import prints
from draftsmith.core.errors import UserError
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from fails import fails_with
from PIL import Image
from record_forms import write_forms
from small_records import talk

KEY = "stages.finetune.data.path"


@pytest.fixture
def forms(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    turns = talk("<image>\nWhich?", "The first.")
    rows = [{"id": str(n), "image": "a.png", "conversations": turns} for n in range(6)]
    return write_forms(tmp_path / "forms", rows, tmp_path)


def setting(source) -> str:
    return f"{KEY}={source if isinstance(source, str) else json.dumps(source.model_dump(mode='json'))}"


def fingerprint(source) -> str:
    loaded = load(["recipe=llava15-68m", setting(source)])
    return next(p.fingerprint for p in plan(loaded.recipe, loaded.path) if p.name == "finetune")


@pytest.mark.parametrize("form", ["arrow", "parquet", "tar"])
def test_a_fingerprint_follows_the_files(forms, form):
    first = fingerprint(forms[form])
    assert fingerprint(forms[form]) == first
    changed = {"arrow": "arrow/data-00000-of-00001.arrow", "parquet": "parquet/train-00000-of-00001.parquet",
               "tar": "shard-001.tar"}[form]  # fmt: skip
    path = Path(forms["json"]).parent / changed
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert fingerprint(forms[form]) != first


@pytest.mark.parametrize("form", ["arrow", "tar"])
def test_a_dry_run_counts_what_opens_fast(forms, form, capsys):
    shown = prints(capsys, ["recipe=llava15-68m", "dry_run=true", "stages=[finetune]", setting(forms[form])])
    assert "samples 6 (measured)" in shown and "3,456 visual tokens (measured)" in shown


def test_a_dry_run_converts_nothing(forms, tmp_path, capsys):
    assert main(["recipe=llava15-68m", "dry_run=true", "stages=[finetune]", setting(forms["parquet"])]) == 0
    assert "665,298 (declared)" in capsys.readouterr().out and not (tmp_path / "hf").exists()


@pytest.mark.parametrize("form", ["arrow", "parquet", "tar"])
def test_check_finds_them(forms, form, tmp_path, capsys):
    """Without the target's processor no record can be encoded: they are there, and what is missing is named."""
    settings = [f"output={tmp_path / 'run'}", setting(forms[form]), "stages=[finetune]"]
    main(["check", "llava15-68m", *settings])
    shown = capsys.readouterr().out
    assert "ok       stages.finetune.data    on disk, not read: the tokenizer and configs of llava-hf/" in shown


def test_an_inline_text_encoder_needs_a_tokenizer_from_somewhere(tmp_path):
    page = Path(__file__).resolve().parents[2] / "docs" / "data.md"
    path = tmp_path / "drawn.yaml"
    path.write_text(re.search(r"```yaml run drawn.yaml\n(.*?)```", page.read_text(), re.S)[1])

    def planned(*settings):
        loaded = load([f"recipe={path}", *settings])
        return {p.name: p for p in plan(loaded.recipe, loaded.path)}

    assert planned()["target"].inputs == {"codes": "codes"}
    assert planned()["target"].fingerprint != planned("target.tokenizer=other")["target"].fingerprint
    fails_with(r"needs a tokenizer[\s\S]*target\.tokenizer", planned, "target.tokenizer=null")
    with pytest.raises(UserError, match=r"tokenizer is given, and text_encoder is not spelt out"):
        load(["recipe=eagle-llamagen-xl-stage1", "target.tokenizer=folder"])
