"""Recipes with Qwen-VL targets: a tiny one is made, trained, read for heads and decoded with every kind of drafter."""

import json

import heads_run
import pytest
import torch
from draftsmith.core.pretrained import Checkpoint
from draftsmith.data.processor_files import load_processor
from draftsmith.models.formats.export import export_drafter
from draftsmith.models.targets.load import load_target
from draftsmith.models.targets.qwen.section import QwenTargetConfig
from safetensors.torch import load_file
from tiny_qwen import text_config, vision_config

FORMAT = {"template": "qwen_vl", "image_rule": "verbatim"}
VIDEO = {"num_frames": 4, "fps": None, "min_frames": 2, "min_pixels": 256, "max_pixels": 256}
KINDS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def for_qwen(value):
    """A section of the LLaVA recipe with Qwen-VL's template and frames."""
    if isinstance(value, list):
        return [for_qwen(item) for item in value]
    if not isinstance(value, dict):
        return value
    own = {"format": FORMAT, "video": VIDEO}
    return {key: own[key] if key in own else for_qwen(item) for key, item in value.items()}


@pytest.fixture
def recipe_of(monkeypatch):
    def change(kind: str) -> None:
        recipe = for_qwen(heads_run.RECIPE)
        tower = vision_config(kind, 32) | {"patch_size": 8}
        recipe["target"] = {"kind": kind, "language_model": text_config(kind, 6, 32), "vision_tower": tower}
        recipe["target"]["prefill_chunk"] = 24
        recipe["stages"]["target"]["trainable"] = ["vision_tower", "projector", "language_model"]
        monkeypatch.setattr(heads_run, "RECIPE", recipe)

    return change


def test_a_tiny_target_is_trained_and_answers(recipe_of, tmp_path):
    recipe_of("qwen2_5_vl")
    told = heads_run.run(tmp_path, stages=["world", "target", "answers"])
    assert any("<|vision_start|><image x 1><|vision_end|>" in line for line in told)
    made = load_processor(tmp_path / "target")
    assert (made.family, made.patch_size, made.image_size) == ("qwen2_5_vl", 8, 16)
    assert json.loads((tmp_path / "target" / "config.json").read_text())["model_type"] == "qwen2_5_vl"
    own = load_target(
        QwenTargetConfig(kind="qwen2_5_vl", path=str(tmp_path / "target")), tmp_path / "target",
        num_token_ids=len(made.tokenizer), image_token_id=made.image_token_id, device=torch.device("cpu"),
    )  # fmt: skip
    assert own.decoder.model.config.image_token_id == made.image_token_id
    assert any("4 answers" in line for line in told)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_on_a_tiny_target(kind, recipe_of, tmp_path):
    recipe_of(kind)
    told = "\n".join(heads_run.run(tmp_path))
    assert "Greedy outputs are identical to plain decoding" in told


def test_a_native_head_is_trained_and_goes_back_into_the_target(recipe_of, tmp_path, monkeypatch):
    """The target of a run has no head of its own, so it begins from scratch; with it, the folder has one."""
    recipe_of("qwen3_5")
    stages = {name: heads_run.RECIPE["stages"][name] for name in ("world", "target", "states", "head", "evaluate")}
    stages["states"] = stages["states"] | {"drafters": [{"kind": "mtp"}]}
    decoded = {key: value for key, value in stages["evaluate"].items() if key not in ("probes", "lengths")}
    stages["evaluate"] = decoded | {"methods": {"MTP": {"drafter": "head", "tree": {"kind": "chain", "gamma": 3}}}}
    stages["head"] = stages["head"] | {"from": "scratch"}
    monkeypatch.setattr(heads_run, "RECIPE", heads_run.RECIPE | {"drafter": {"kind": "mtp"}, "stages": stages})
    told = "\n".join(heads_run.run(tmp_path))
    assert "Greedy outputs are identical to plain decoding" in told
    export_drafter(tmp_path / "head", tmp_path / "out", "vllm", target=str(tmp_path / "target"))
    shipped = Checkpoint(tmp_path / "out").under("mtp.")
    trained = load_file(tmp_path / "head" / "model.safetensors")
    assert {f"mtp.{name}" for name in shipped} == set(trained)
    assert all(torch.equal(value, trained[f"mtp.{name}"]) for name, value in shipped.items())
