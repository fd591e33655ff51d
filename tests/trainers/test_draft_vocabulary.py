"""EAGLE-1 and Medusa heads with a vocabulary of their own, from a recipe to its report and the exports' refusal."""

import json

import pytest
from draftsmith.recipes.commands.cli import main
from fails import fails_with
from safetensors.torch import load_file
from text_run import made, recipe, run

SIZE = 40


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_head_of_few_ids_is_trained_measured_and_refused_by_engines(tmp_path, kind, capsys):
    source, output = recipe(made(tmp_path)), tmp_path / "run"
    source["drafter"] = {"kind": kind, "draft_vocab_size": SIZE}
    method = source["stages"]["evaluate"]["methods"].popitem()[1]
    source["stages"]["evaluate"] |= {"methods": {"head": method}, "temperatures": [0.0, 1.0]}
    run(source, output)
    held = load_file(output / "train" / "model.safetensors")
    assert held["lm_head.weight"].shape == (SIZE, 32) and len(held["d2t"]) == SIZE
    report = json.loads((output / "evaluate" / "report.json").read_text())
    (greedy,) = (cell for cell in report["cells"] if cell["method"] == "head" and not cell["temperature"])
    assert greedy["identical"] == greedy["requests"] == 3
    fails_with("draft_vocab_size", run, source, output, "drafter.draft_vocab_size=39", stages=["evaluate"])
    engine = {"eagle": "vllm", "medusa": "sglang"}[kind]
    assert main(["export", str(output / "train"), str(tmp_path / "there"), "--to", engine]) != 0
    assert {"eagle": "draft_vocab_size", "medusa": "vLLM 0.32 alone has Medusa"}[kind] in capsys.readouterr().err
