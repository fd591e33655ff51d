"""Heads with a vocabulary of their own, from a recipe to its report; what teaches a head nothing is said."""

import json

import pytest
import torch
from draftsmith.core.errors import TrainingError
from draftsmith.recipes.commands.cli import main
from fails import fails_with
from heads_tiny import config_of
from safetensors.torch import load_file
from states_run import context, losses, parsed, section, synthetic
from text_run import QUESTIONS, made, recipe, run

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


# Losses that compare with what the target writes: cross-entropy takes the answer's own token.
WITH_TARGET = {"loss": {"token_divergence": "kl"}}
SETTINGS = {
    "eagle": {}, "eagle3": {"taps": (1, 2, 3)}, "medusa": WITH_TARGET,
    "dflash": {"taps": (1, 2, 3), "block_size": 4, "mask_token_id": 5, **WITH_TARGET},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "dflash"])
def test_an_lm_head_begins_with_the_targets_rows_and_a_frozen_one_keeps_them(tmp_path, kind):
    """EAGLE-3's begins at random, unless the stage says otherwise: its loss begins higher."""
    made, heads = synthetic(tmp_path), {}
    config = config_of(kind=kind, draft_vocab_size=SIZE, **SETTINGS[kind])
    for how in (None, "from_target", "frozen"):
        asked = context(made, tmp_path / f"train-{how}", config)
        stage = parsed(asked.target, config, section(made, source={"kind": "online"}, lm_head=how, steps=3))
        stage.run(asked)
        heads[how] = load_file(asked.folder / "model.safetensors"), losses(asked.folder)
    (_, own), (learns, begun), (held, frozen) = heads.values()
    target = load_file(made.folder / "target" / "model.safetensors")
    (rows,) = (rows for name, rows in target.items() if name.endswith("lm_head.weight"))
    assert torch.equal(held["lm_head.weight"], rows[held["d2t"] + torch.arange(SIZE)])
    assert not torch.equal(learns["lm_head.weight"], held["lm_head.weight"])
    assert begun[1] == frozen[1] and frozen[1] != frozen[3] != begun[3]
    assert (own == begun) == (kind != "eagle3")
    again = context(made, tmp_path / "again", config, {"drafter": tmp_path / "train-frozen"})
    stage = parsed(again.target, config, section(made, source={"kind": "online"}, lm_head="from_target", steps=3))
    fails_with("begins a draft from scratch, and this stage goes on", stage.run, again)
    asked = context(made, tmp_path / "none", config_of(kind="eagle"))
    stage = parsed(asked.target, asked.drafter, section(made, source={"kind": "online"}, lm_head="frozen"))
    fails_with("has no LM head of its own", stage.run, asked)


@pytest.mark.parametrize("kind", SETTINGS)
def test_ids_that_the_target_never_writes_are_told_and_soon_an_error(tmp_path, kind, capfd):
    """Answers that are not the target's: its own tokens have another id than the draft's one."""
    made = synthetic(tmp_path)
    asked = context(made, tmp_path / "train", config_of(kind=kind, draft_vocab_size=2, **SETTINGS[kind]))
    stage = parsed(asked.target, asked.drafter, section(made, source={"kind": "online"}, held_out=0, steps=9))
    error = fails_with("step 8: the loss of 8 logs compares no token", stage.run, asked, error=TrainingError)
    assert "drafter.draft_vocab_size: 2" in error.hint
    assert asked.say.lines[1].startswith("step 1: the loss compares no token: the target writes none")
    assert "the draft's own 2 ids are 28.0% of the supervised tokens" in capfd.readouterr().err


def test_answers_of_one_token_teach_a_head_or_are_left_out(tmp_path):
    """In batches of one. Medusa's levels, and blocks, begin with an answer's second token."""
    source, stages = recipe(made(tmp_path)), ["answers", "states", "train"]
    source["stages"]["answers"]["max_new_tokens"] = source["stages"]["train"]["batch_size"] = 1
    run(source, tmp_path / "run", stages=stages)
    assert all(losses(tmp_path / "run" / "train").values())
    source["drafter"] = {"kind": "medusa"}
    fails_with(rf"no sample to train on(.|\n)*{QUESTIONS} samples of one token are left out: medusa learns from an",
               run, source, tmp_path / "medusa", stages=stages)  # fmt: skip
