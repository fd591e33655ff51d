"""Full-size recipes load, validate and count right without a network."""

import json

import pytest
import torch
from command_line import prints
from draftsmith.models.hub import pinned_config
from draftsmith.models.targets import sizes
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config.dry_run import dry_run
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.estimate import train_stage
from draftsmith.trainers.estimate.evaluation import describe_evaluation
from draftsmith.trainers.estimate.models import target_lines
from recorded import recorded_dry_run
from safetensors.torch import save_file
from small_records import talk


@pytest.mark.parametrize(("recipe", "expected"), [
    ("llava15-68m", ["68,128,512", "1,377,792", "7,063,427,072", "steps 5,198", "steps 2,181", "321,481,728 visual"]),
    ("llava15-160m", ["162,515,712", "1,377,792", "steps 5,198"]),
    ("llava-ov-68m", [
        "373,013,760 in all", "steps 1,091", "steps 7,813", "steps 6,250", "steps 3,125", "321,481,728 visual",
    ]),
    ("llava-ov-160m", ["162,515,712", "steps 7,813"]),
    ("llava-ov-68m-anyres", ["428,225,600", "1,476,864", "8,192 ids, 729 of them for each tile"]),
    ("llava15-68m-distilled", [
        "68,128,512", "steps 5,198", "answers 665,298 (declared), each of up to 256 tokens", "takes 13.2 GiB per rank",
    ]),
    ("llava15-160m-distilled", ["162,515,712", "distills by lk_hybrid"]),
    ("demo/lvlm-from-nothing", ["22200 records", "steps 1,300"]),
    ("demo/lvlm-distilled", ["answers 22,200 (generated)", "stage distill_2 (train)", "distills by lk_hybrid"]),
    ("demo/lvlm-ov", ["stories: 900 records", "samples 11,240 (generated)", "samples 1,000 (generated)"]),
    ("eagle-llamagen-xl-stage1", ["777,678,080", "23,595,520", "44,567,040", "steps 118,760", "46.1 GiB"]),
    ("eagle-llamagen-xl-stage2", ["777,678,080", "23,595,520", "1024 codes"]),
    ("eagle-llamagen-c2i-l", ["342,910,976", "14,944,256"]),
    ("eagle-llamagen-c2i-xl", ["774,699,520", "23,595,520", "44,567,040", "576 codes"]),
    ("eagle-llamagen-c2i-3b", ["3,096,659,200", "145,004,800"]),
    ("eagle-anole-7b", ["7,043,090,432", "235,958,272", "504,393,728", "steps 140,140"]),
    ("eagle-llamagen-xl-stage1-200k", ["23,595,520", "200,000 samples (declared)", "steps 237,500"]),
    ("lanternpp-llamagen-xl-stage1", ["23,595,520", "at most 57 nodes, rule lantern, sampled draws"]),
    ("lanternpp-anole-7b", ["235,958,272", "LANTERN++ (k = 10, lambda = 4)"]),
    ("medusa-llamagen-3b", ["3,096,659,200", "51,216,000"]),
    ("chain-llamagen-3b", ["3,096,659,200", "342,910,976", "nothing is trained"]),
    ("demo/visual-ar", ["656,960", "steps 1,600"]),
    ("demo/video", ["samples 6,940", "400 (generated), 0 of them held out; 0 with", "out; 5,200 with pictures"]),
])  # fmt: skip
def test_counts(recipe, expected):
    """By the recorded text, which tests/test_goldens.py makes anew."""
    shown = recorded_dry_run(recipe)
    assert "exit code" not in shown
    for number in expected:
        assert number in shown


@pytest.mark.parametrize("recipe", ["llava-ov-68m", "sparrow-qwen2.5-vl-7b", "eagle-llamagen-c2i-l", "demo/video"])
def test_it_says_what_is_recorded_and_writes_nothing(recipe, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown, expected = prints(capsys, [f"recipe={recipe}", "dry_run=true"]), recorded_dry_run(recipe)
    stages = [line for line in expected.splitlines() if line.startswith("stage ")]
    assert stages and [line for line in shown.splitlines() if line.startswith("stage ")] == stages
    assert list(tmp_path.iterdir()) == []


def test_data_on_disk_replaces_what_was_declared(capsys, tmp_path):
    def record(picture):
        turns = talk(f"{'<image> ' * picture}what is it", "a cat")
        return {"id": str(picture), "conversations": turns} | ({"image": "a.png"} if picture else {})

    path = tmp_path / "data.json"
    path.write_text(json.dumps([record(True), record(False), record(True)]))
    shown = prints(capsys, ["recipe=llava15-68m", "dry_run=true", f"stages.finetune.data.path={path}"])
    assert "samples 3 (measured)" in shown
    assert "an epoch has 17 words of text and 1,152 visual tokens (measured)" in shown
    assert "steps 1 at batch 128" in shown and sorted(tmp_path.iterdir()) == [path]


def test_a_pattern_without_a_match_is_said(capsys, tmp_path, monkeypatch):
    """And is no error: a dry run may be elsewhere than the data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there-1.json").write_text("[]")
    settings = ["stages.pretrain.data.path=[there-*.json, part-*.json]",
                "stages.finetune.data.path={kind: webdataset, path: 'shards/{a,b}-??.tar'}"]  # fmt: skip
    shown = prints(capsys, ["recipe=llava15-68m", *settings, "dry_run=true"])
    assert "  stages.pretrain.data.path: no file matches the pattern part-*.json here" in shown
    assert "  stages.finetune.data.path: no file matches the pattern shards/a-??.tar here (and 1 more)" in shown
    assert "there-*" not in shown and "stages.evaluate" not in shown
    assert main(["recipe=eagle-llamagen-xl-stage1", "stages.encode.source.path=x/*.tar",
                 "stages=[encode]", "dry_run=true"]) == 0  # fmt: skip
    assert "stages.encode.source.path: no file matches the pattern x/*.tar here" in capsys.readouterr().out


@pytest.mark.parametrize(("settings", "expected"), [
    (["recipe=demo/lvlm-ov"], ["dtype auto (float32: the recipe spells it out)", "precision auto (fp32)"]),
    (
        ["recipe=llava15-68m", "target.dtype=auto", "engine.precision=auto"],
        ["dtype auto (as stored, which a dry run does not look up: counted as bfloat16; float32 on a CPU)",
         "precision auto (bf16 on a GPU that computes in it, else fp32)"],
    ),
    (["recipe=sparrow-qwen2.5-vl-7b", "target.dtype=auto"], ["frozen target 2.0"]),
])  # fmt: skip
def test_auto_is_said_with_what_it_is_counted_as(settings, expected, capsys):
    shown = prints(capsys, [*settings, "dry_run=true"])
    assert [text for text in expected if text not in shown] == []


def test_auto_of_weights_on_this_disk_is_what_they_are_stored_in(capsys, tmp_path):
    """And their memory is counted so."""
    shown = []
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        save_file({"w": torch.zeros(4, dtype=dtype)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "llava", **pinned_config("llava-1.5-7b-hf")}))
        assert (
            main(
                [
                    "recipe=eagle-llava15-7b",
                    "dry_run=true",
                    "stages=[text]",
                    f"target.path={folder}",
                    "target.dtype=auto",
                ]
            )
            == 0
        )
        shown.append(capsys.readouterr().out)
    assert "dtype auto (float32: as stored; float32 on a CPU)" in shown[0] and "frozen target 26.3" in shown[0]
    assert "dtype auto (bfloat16: as stored; float32 on a CPU)" in shown[1] and "frozen target 13.2" in shown[1]


def test_a_targets_vocabulary_is_said_where_a_draft_must_have_the_same():
    for name, is_said in (("llava15-68m", True), ("sparrow-qwen2.5-vl-7b", False)):
        assert ("vocabulary" in target_lines(load([f"recipe={name}"]).recipe)[-1]) is is_said


def test_a_methods_own_temperatures_stand_in_its_line():
    """LANTERN stood there twice under "temperatures 0, 1" with one line each, and nothing told which was which."""
    shown = recorded_dry_run("eagle-llamagen-xl-stage1")
    lanterns = [line for line in shown.splitlines() if line.startswith("    LANTERN")]
    assert lanterns and all("; temperature" in line and line.endswith(" alone") for line in lanterns)
    loaded = load(["recipe=demo/lvlm", "stages.evaluate.temperatures=[0, 0.5, 1]",
                   "stages.evaluate.methods.M.temperatures=[0.5, 1]"])  # fmt: skip
    lines = describe_evaluation(loaded.recipe.stages["evaluate"])
    assert next(line for line in lines if line.startswith("    M:")).endswith("; temperatures 0.5, 1 alone")
    assert not any("alone" in line for line in lines if not line.startswith("    M:"))


def test_each_model_is_counted_once_for_what_is_asked_of_it():
    """Two stages train different parts of one draft, and are asked three times each; the target is a model, too."""
    counts = sizes._counted, train_stage._trainable
    for kept in counts:
        kept.cache_clear()
    loaded = load(["recipe=llava15-68m"])
    dry_run(loaded.recipe, plan(loaded.recipe, loaded.path))
    assert [kept.cache_info().misses for kept in counts] == [2, 2]
    assert train_stage._trainable.cache_info().hits >= 2
