"""Full-size recipes load, validate and count right without a network."""

import json

import pytest
import torch
from command_line import prints
from draftsmith.models.hub import pinned_config
from draftsmith.recipes.commands.cli import main
from recorded import recorded_dry_run
from safetensors.torch import save_file
from small_records import talk


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
