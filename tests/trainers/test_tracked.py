"""What trackers get of a finished stage, and that they are closed however it ends."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from draftsmith.core.tracking import TrackingConfig, WandbConfig
from draftsmith.eval.run_reports import COLUMNS
from draftsmith.trainers.run.context import Context, EngineConfig, tracked
from draftsmith.trainers.train.checkpoint import verified
from fails import fails_with
from fake_wandb import FakeWandb
from training import run


def context(folder: Path, **wandb) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    config = TrackingConfig(wandb=WandbConfig(project="p", mode="offline", **wandb))
    return Context(
        name="finetune", folder=folder, seed=0, fingerprint="x", target=None, drafter=None, engine=EngineConfig(),
        tracking=config, inputs={}, say=pytest.fail,
    )  # fmt: skip


def handed_on(wandb: FakeWandb) -> list[tuple[str, list[str]]]:
    return [(artifact.type, sorted(artifact.files)) for artifact, _ in wandb.artifacts]


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text("{}")


def test_an_evaluation_hands_on_its_table_plots_and_report(tmp_path, wandb):
    with tracked(context(tmp_path / "run" / "evaluate")) as mine:
        fill(mine.folder, "report.md", "report.html", "speedup.png", "fingerprint.json")
        cell = {"benchmark": "pictures", "turn": "", "budget": "", "temperature": 0.0, "max_new_tokens": 64,
                "method": "M", "exact": True, "requests": 3, "tau": 2.5, "tau_interval": [2.0, 3.0], "DSR": 1.2,
                "ESR": 1.1, "identical": 3, "answers": 3, "drafters": [], "relaxed": False, "DSR_spread": [1.1, 1.3],
                "expected_speedup": 1.3}  # fmt: skip
        (mine.folder / "report.json").write_text(json.dumps({"version": 2, "cells": [cell]}))
    assert wandb.inits[0]["group"] == "run" and wandb.inits[0]["name"] == "finetune"
    table = (list(COLUMNS), [["pictures", "M", 3, 2.5, 2.0, 3.0, 1.2, 3]])
    assert [values for _, values in wandb.lines] == [{"report": table}, {"speedup": mine.folder / "speedup.png"}]
    assert handed_on(wandb) == [("report", ["report.json", "speedup.png"])]
    assert wandb.codes == [0]


@pytest.mark.parametrize("artifacts", ["none", "results"])
def test_a_training_hands_on_its_model_where_the_recipe_says_so(artifacts, tmp_path, wandb):
    with tracked(context(tmp_path, artifacts=artifacts)) as mine:
        tracker = mine.tracker()
        fill(mine.folder, "sample.txt", "model.safetensors", "config.json", "tokenizer.json", "done.json",
             "metrics.jsonl")  # fmt: skip
        assert mine.tracker() is tracker, "one tracker for a stage"
    wanted = [("result", ["config.json", "model.safetensors", "tokenizer.json"])]
    assert handed_on(wandb) == (wanted if artifacts == "results" else [])
    assert len(wandb.inits) == 1 and wandb.codes == [0]


def test_a_stage_that_fails_is_told_as_failed(tmp_path, wandb):
    mine = context(tmp_path)

    def stage():
        with tracked(mine):
            mine.tracker().log({"loss": 1.0}, 1)
            raise RuntimeError("out of memory")

    fails_with("out of memory", stage, error=RuntimeError)
    assert wandb.codes == [1] and wandb.artifacts == []


def test_a_report_that_no_tracker_can_read_spoils_no_stage(tmp_path, wandb):
    said = []
    mine = replace(context(tmp_path), say=said.append)
    with tracked(mine):
        (mine.folder / "report.json").write_text('{"cells": [{"tau": "many"}]}')
    assert len(said) == 1 and "tracking failed, and the run continues without it" in said[0]
    assert wandb.codes == [0], "the stage itself is whole"


def test_each_checkpoint_is_told_once_it_is_whole(tmp_path):
    told = []
    run(tmp_path, steps=5, every=2, keep=1, saved=lambda path, step: told.append((step, verified(path).step)))
    assert told == [(2, 2), (4, 4)]
