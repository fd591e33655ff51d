"""A saved folder in an evaluation: its settings come from there, and what is said beside it otherwise is refused."""

import pytest
from command_line import prints
from draftsmith.models.drafters import Eagle3Config, MedusaConfig, NgramConfig
from draftsmith.trainers.evaluate.drafters import as_saved
from fails import fails_with
from text_run import made, recipe, run


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run whose head has settings of its own, and its recipe."""
    source = recipe(made(tmp_path_factory.mktemp("saved")))
    source["drafter"] |= {"taps": [1, 2, 3], "draft_vocab_size": 50, "positions": "compact"}
    output = tmp_path_factory.mktemp("run")
    run(source, output, stages=["answers", "states", "train"])
    return output / "train", source


def test_an_evaluation_names_the_folder_alone(saved, tmp_path):
    folder, source = saved
    method = source["stages"]["evaluate"]["methods"]["EAGLE-3"]
    evaluate = source["stages"]["evaluate"] | {
        "drafters": {"mine": {"kind": "eagle3", "path": str(folder)}}, "methods": {"E": method | {"drafter": "mine"}},
    }  # fmt: skip
    alone = {"target": source["target"], "stages": {"evaluate": evaluate}}
    run(alone, tmp_path / "a")
    assert (tmp_path / "a" / "evaluate" / "report.json").exists()
    error = fails_with("", run, alone, tmp_path / "b", "stages.evaluate.drafters.mine.draft_vocab_size=51")
    assert "draft_vocab_size is 51 here, and 50 in" in error.problem and str(folder) in error.problem
    assert error.key == "stages.evaluate.drafters.mine.draft_vocab_size"


def test_what_is_said_and_what_is_kept(saved):
    folder, _ = saved
    path = str(folder)
    kept = as_saved(Eagle3Config(kind="eagle3", path=path), "key a")
    assert (kept.taps, kept.draft_vocab_size, kept.positions, kept.path) == ((1, 2, 3), 50, "compact", path)
    equal = as_saved(Eagle3Config(kind="eagle3", path=path, taps=(1, 2, 3), positions="flat"), "key a")
    assert equal.positions == "flat" and equal.taps == (1, 2, 3), "positions are decoding's"
    for other in (Eagle3Config(kind="eagle3", path=path, mtp_steps=5), MedusaConfig(kind="medusa", path=path)):
        fails_with("here, and", as_saved, other, "key a")
    lookup = NgramConfig(kind="ngram")
    assert as_saved(lookup, "key a") is lookup


def test_an_export_names_the_targets_place(saved, tmp_path, capsys):
    """It is in the folder's manifest: nobody has to say it again for the command that serves."""
    folder, source = saved
    said = prints(capsys, ["export", str(folder), str(tmp_path / "head"), "--to", "vllm"])
    assert f"vllm serve {source['target']['path']} --speculative-config" in said and "TARGET" not in said
    assert f"--target {source['target']['path']}" in said
