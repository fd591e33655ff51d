"""The tutorial from data to `vllm serve`, at tiny size: the recipe that ships, its measured chains, the export.

Only the lengths, the numbers of samples and the target are smaller.
"""

import json
from pathlib import Path

import pytest
import yaml
from draftsmith.recipes.commands.cli import main
from tiny_qwen import text_config, vision_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorials" / "qwen2.5-vl-to-vllm.md"
FORMAT = {"template": "qwen_vl", "image_rule": "next"}
LANGUAGE = text_config("qwen2_5_vl", 7, 32) | {"max_position_embeddings": 8192}
TOWER = vision_config("qwen2_5_vl", 32) | {"patch_size": 8}
PIXELS = {"min_pixels": 256, "max_pixels": 1024}
TARGET = {
    "target": {"kind": "qwen2_5_vl", "language_model": LANGUAGE, "vision_tower": TOWER},
    "stages": {
        "world": {
            "kind": "generate", "image_size": 32, "patch_size": 8, "vocab_size": 420,
            "splits": {"text": {"sums": 24}, "pictures": {"caption": 24}, "held_out": {"caption": 3}},
        },
        "target": {
            "kind": "train", "model": "target", "trainable": ["projector", "language_model"], "format": FORMAT,
            "data": {"from": "world", "path": "pictures", **PIXELS, "max_length": 256}, "steps": 2, "batch_size": 4,
            "optim": {"lr": 0.001},
        },
    },
    "output": "runs/target",
}  # fmt: skip


def tiny(world: Path) -> dict:
    """What the tutorial's recipe is told beside its own settings: where things lie, and fewer of them."""
    few = {
        "epochs": 1,
        "batch_size": 4,
        "num_workers": 0,
        "held_out": 0.2,
        "validation": {"every": 4, "max_samples": 2},
    }
    text = {"path": str(world / "text.json")}
    pictures = {"path": str(world / "pictures.json"), "images": str(world), **PIXELS}
    return {
        "extends": "eagle3-qwen2.5-vl-7b",
        "target": {"path": "runs/target/target", "dtype": "float32"},
        "drafter": {"draft_vocab_size": 200},
        "stages": {
            "text": {"data": text, **few},
            "answers": {"data": pictures, "max_new_tokens": 6, "batch_size": 4},
            "pictures": {"data": pictures, **few},
            "chains": {
                "format": FORMAT,  # a generated target has no chat template
                "benchmarks": {
                    "held-out": {"data": {"path": str(world / "held_out.json"), "images": str(world), **PIXELS}}
                },
                "max_new_tokens": 8,
            },
            # What the page leaves out, too: published sets and clips.
            "evaluate": None,
            "by_length": None,
            "images": None,
        },
        "engine": {"zero_stage": 0, "precision": "fp32"},
        "tracking": {"wandb": None},
        "output": "runs/tutorial",
    }


@pytest.mark.slow
def test_data_train_measured_chain_export(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target.yaml").write_text(yaml.safe_dump(TARGET, sort_keys=False))
    assert main(["recipe=target.yaml"]) == 0
    assert 'evaluate eagle3-qwen2.5-vl-7b "stages=[chains]"' in PAGE.read_text()
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny(tmp_path / "runs/target/world/world"), sort_keys=False))
    assert main(["recipe=tiny.yaml"]) == 0
    report = json.loads((tmp_path / "runs/tutorial/chains/report.json").read_text())
    assert "chain of 3" in json.dumps(report) and "chain of 5" in json.dumps(report)
    capsys.readouterr()
    export = ["export", "runs/tutorial/pictures", "out/EAGLE3-Qwen2.5-VL-7B", "--to", "vllm"]
    assert main(export) == 0
    said = capsys.readouterr().out
    assert "serve with runner V2" in said and "num_speculative_tokens" in said and "vllm serve" in said
    assert "verify-engine out/EAGLE3-Qwen2.5-VL-7B --without-known-faults" in said
    assert (tmp_path / "out/EAGLE3-Qwen2.5-VL-7B/model.safetensors").is_file()
