"""Recipes with InternVL, Mistral 3, Pixtral and Gemma 4: a tiny target is made, trained, read for heads and decoded."""

import copy
import json

import heads_run
import pytest
import tiny_gemma
from draftsmith.data.processor_files import load_processor
from tiny_towers import is_whole, text_values, tower_values

TEXT = {"internvl": "qwen2", "mistral3": "mistral", "pixtral": "mistral"}
HEADS = {"head": {"kind": "eagle3", "taps": [1, 2, 3]}, "block": {"kind": "dflash", "block_size": 4, "num_layers": 1}}


TEMPLATES = {"internvl": "internvl", "mistral3": "mistral", "pixtral": "mistral", "gemma4": "gemma"}


def parts_of(kind: str) -> tuple[dict, dict]:
    """Configs of a language model of four layers and of a tower."""
    if kind == "gemma4":
        text = {"model_type": "gemma4_text", **tiny_gemma.text_values("small")}
        return text, {"model_type": "gemma4_vision", **tiny_gemma.tower_values()}
    text = {"model_type": TEXT[kind], **text_values(4)} | ({"sliding_window": None} if is_whole(kind) else {})
    tower = {"model_type": "pixtral" if is_whole(kind) else "internvl_vision", **tower_values(kind)}
    return text, tower | {"image_size": 24}


def of_kind(kind: str) -> dict:
    """The LLaVA recipe with this target, EAGLE-3 and DFlash; without clips where the target reads none."""
    recipe = copy.deepcopy(heads_run.RECIPE)
    template = {"template": TEMPLATES[kind], "image_rule": "verbatim"}
    text, tower = parts_of(kind)
    recipe["target"] = {"kind": kind, "language_model": text, "vision_tower": tower, "prefill_chunk": 24}
    recipe["drafter"] = HEADS["head"]
    stages = recipe["stages"]
    stages["world"] |= {"patch_size": 4}
    stages["target"]["trainable"] = ["vision_tower", "projector", "language_model"]
    stages["states"]["drafters"] = [HEADS["block"]]
    stages["block"] = stages.pop("msd") | {"drafter": HEADS["block"]}
    evaluate = stages.pop("evaluate")
    evaluate["methods"] = {
        "EAGLE-3": {"drafter": "head", "tree": "8-3-3"},
        "DFlash": {"drafter": "block", "tree": {"kind": "chain", "gamma": 3}},
        "DFlash, tree": {"drafter": "block", "tree": {"kind": "product", "total": 6, "levels": 3}},
    }
    del evaluate["probes"]
    stages["evaluate"] = evaluate
    if is_whole(kind):
        del stages["world"]["splits"]["train"]["clip"], evaluate["lengths"]
        evaluate["benchmarks"]["sets"]["sets"] = ["SEED-Bench", "GSM8K"]
    for stage in stages.values():
        if "format" in stage:
            stage["format"] = template
    return recipe


@pytest.mark.parametrize("kind", ["internvl", "mistral3", "gemma4"])
def test_a_tiny_target_is_trained_and_answers(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(heads_run, "RECIPE", of_kind(kind))
    told = heads_run.run(tmp_path, stages=["world", "target", "answers"])
    shown = {"internvl": "<img><image x 9></img>", "gemma4": "<|image><image x 64><image|>"}
    assert any(shown.get(kind, "[IMG_BREAK]<image x 3>[IMG_END]") in line for line in told)
    made = load_processor(tmp_path / "target")
    assert (made.family, made.image_size) == {"gemma4": ("gemma4", 12), "internvl": ("internvl", 24)}.get(
        kind, ("pixtral", 8)
    )
    assert json.loads((tmp_path / "target" / "config.json").read_text())["model_type"] == kind
    assert any("4 answers" in line for line in told)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEMPLATES)
def test_heads_on_a_tiny_target(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(heads_run, "RECIPE", of_kind(kind))
    told = "\n".join(heads_run.run(tmp_path))
    assert "Greedy outputs are identical to plain decoding" in told
