"""The leaderboard: what is compared with what, what a drafter weighs and cost, and why a cell is a dash."""

import json

import pytest
import torch
import yaml
from draftsmith.core.results import DONE, Mark, sums_of, write_mark
from draftsmith.eval.run_reports import read_runs
from draftsmith.recipes.commands.comparison import boards, entries
from rows import REPORTED
from safetensors.torch import save_file

STAGES = {
    "target": {"kind": "train", "model": "target", "from": "scratch", "batch_size": 4},
    "pretrain": {"kind": "train", "model": "drafter", "from": "scratch", "batch_size": 8},
    "finetune": {"kind": "train", "model": "drafter", "from": "pretrain", "batch_size": 16},
    "evaluate": {"kind": "evaluate"},
}


def run(folder, *cells, weights=1.0, about=None, ranks=2, gpus=0):
    """A finished run as its stages leave it."""
    for name, steps in (("target", 7), ("pretrain", 10), ("finetune", 20)):
        stage = folder / name
        stage.mkdir(parents=True)
        (stage / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "loss": 1.0}) + "\n" for s in (1, steps)))
        tensors = {"a": torch.full((3, 5), weights), "b": torch.zeros(7, dtype=torch.bfloat16)}
        save_file(tensors, stage / "model.safetensors")
        files = sums_of(stage, ["model.safetensors"])
        write_mark(stage / DONE, Mark("f", seconds=1800.0, ranks=ranks, gpus=gpus, files=files))
    (folder / "evaluate").mkdir()
    about = {"target": "trained in this run", "device": "CPU"} | (about or {})
    report = {"version": 2, "about": about, "cells": [REPORTED | cell for cell in cells]}
    (folder / "evaluate" / "report.json").write_text(json.dumps(report))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"stages": STAGES}, sort_keys=False))
    return folder


@pytest.fixture
def made(tmp_path):
    return run(tmp_path / "a", {"method": "M"}, {"method": "T", "DSR": 1.6, "tau": 3.0})


def test_memory_and_training_are_what_the_folders_say(made):
    first, _ = entries(read_runs([made]))
    assert first.memory == (made / "finetune" / "model.safetensors").stat().st_size
    assert (first.steps, first.samples, first.hours) == (10 + 20, 10 * 8 + 20 * 16, 1.0), "pretrain and finetune alone"
    assert (first.gpu_hours, first.rank_hours) == (0.0, 2.0) and not first.unknown


def test_hours_are_multiplied_by_the_gpus_or_ranks_that_were_recorded(made, tmp_path):
    on_gpus = run(tmp_path / "b", {}, ranks=8, gpus=8)
    spread = run(tmp_path / "c", {}, ranks=1, gpus=4)
    old = run(tmp_path / "d", {}, ranks=None, gpus=None)
    (board,) = boards(entries(read_runs([made])))
    assert board.column("rank-hours") == [2.0, 2.0], "two ranks of a CPU for an hour"
    (board,) = boards(entries(read_runs([made, on_gpus, spread, old])))
    hours = dict(zip(board.column("run"), board.column("GPU-hours"), strict=True))
    assert hours == {"a": 0.0, "b": 8.0, "c": 4.0, "d": None} and set(board.column("hours")) == {1.0}
    reason = "Dashes of d, M: stage pretrain was trained by an earlier version, which did not record its ranks."
    assert reason in board.footnotes


def test_a_stage_without_weights_weighs_nothing_that_is_known(made):
    (made / "finetune" / "model.safetensors").unlink()
    (board,) = boards(entries(read_runs([made])))
    assert board.column("drafter MiB") == [None, None]
    assert "stage finetune has left no model.safetensors." in board.footnotes[0]


def test_the_fastest_comes_first_and_an_ensemble_counts_a_shared_start_once(made, tmp_path):
    other = run(tmp_path / "b", {"method": "both", "drafters": ["finetune", "pretrain"], "DSR": 9.0, "relaxed": True})
    (board,) = boards(entries(read_runs([made, other])))
    assert board.column("method") == ["T", "M", "both (relaxed)"], "relaxed rules are no competition"
    assert board.column("steps") == [30, 30, 30]
    assert board.column("drafter MiB")[2] == 2 * board.column("drafter MiB")[0]


def test_what_differs_in_requests_temperature_or_target_is_not_compared(made, tmp_path):
    run(tmp_path / "b", {}, {"temperature": 1.0}, {"benchmark": "clips"}, {"max_new_tokens": 8})
    run(tmp_path / "c", {}, weights=2.0)
    run(tmp_path / "d", {}, about={"target": "llava-hf/llava-1.5-7b-hf"})
    tables = boards(entries(read_runs([tmp_path / name for name in "abcd"])))
    shared, *others = tables
    assert shared.column("run") == ["a", "a", "b"], "equal weights of two runs are one target"
    assert [table.column("run") for table in others] == [["b"], ["b"], ["b"], ["c"], ["d"]]
    assert "T 1" in others[0].title and "clips" in others[1].title and "8 new tokens" in others[2].title
    assert others[4].title.endswith("target llava-hf/llava-1.5-7b-hf")
    assert shared.note and not any(table.note for table in others), "words are explained once"
