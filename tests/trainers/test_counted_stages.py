"""Stages count what they do for the line that people watch: everything once, and what was finished before as such."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from draftsmith.data.answers import SHARDS as ANSWERS
from draftsmith.data.shards.shards import shard_path
from draftsmith.data.stage_folders import CODES, STATES
from draftsmith.trainers.run.progress import StageLine
from draftsmith.trainers.stages.cache import CacheStage
from draftsmith.trainers.stages.encode import EncodeStage
from draftsmith.trainers.stages.generate import GenerateStage
from draftsmith.trainers.stages.regenerate import RegenerateStage
from states_run import RECORDS, synthetic
from states_run import context as text_context
from visual_run import context as image_context
from visual_run import noise, with_target


class Counted(StageLine):
    """Keeps each `count` of a stage, and how far it came: [unit, total, done before, done]."""

    def __init__(self, name: str = "stage"):
        super().__init__(name, live=False)
        self.counts: list[list[str | int]] = []

    def count(self, unit, total, done=0, **how):
        super().count(unit, total, done, **how)
        self.counts.append([unit, total, done, done])

    def advance(self, done=None):
        before = self._task.completed
        super().advance(done)
        assert self._task.completed >= before
        self.counts[-1][3] = self._task.completed


def counted(stage, context) -> list[list[str | int]]:
    line = Counted()
    stage.run(replace(context, line=line))
    return line.counts


def drop(folder: Path, index: int) -> None:
    """As a killed run leaves it: a shard is missing, and so is the manifest."""
    os.remove(shard_path(folder, index))
    os.remove(folder / "manifest.json")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return synthetic(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return with_target(tmp_path_factory.mktemp("images"))


def test_generate_counts_the_records_of_splits_and_suites(text, tmp_path):
    stage = GenerateStage(
        kind="generate", vocab_size=420, splits={"train": {"name": 3, "sums": 2}}, suite=1, video_suite=1,
        clip_lengths=[4, 8], clip_kinds=["clip", "clip_late"],
    )  # fmt: skip
    ((unit, total, before, done),) = counted(stage, text_context(text, tmp_path))
    # The last record is begun, and all before it are done.
    assert (unit, before, done) == ("record", 0, total - 1) and total > 5 + 4


def test_generate_counts_captioned_pictures(images, tmp_path):
    stage = GenerateStage(kind="generate", splits={"train": 40, "held_out": 3}, vocab_size=300)
    assert counted(stage, image_context(tmp_path, images.target, {})) == [["picture", 43, 0, 42]]


def test_encode_counts_pictures_and_those_it_refuses(images, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(11):
        (tmp_path / "in" / f"{number:03d}.png").write_bytes(noise(number)[: 200 if number == 5 else None])
        (tmp_path / "in" / f"{number:03d}.txt").write_text("a picture")
    stage = EncodeStage(
        kind="encode", source={"kind": "folder", "folder": str(tmp_path / "in")}, samples_per_shard=4, batch_size=3
    )
    context = image_context(tmp_path / "out", images.target, images.inputs)
    duplicates = ["duplicates: picture", 11, 0, 11]
    assert counted(stage, context) == [duplicates, ["picture", 11, 0, 11]]
    drop(tmp_path / "out" / CODES, 2)  # the last one holds three
    finished = ["duplicates: picture", 11, 0, 0]  # nothing is looked at again
    assert counted(stage, context) == [finished, ["picture", 11, 8, 11]]


def test_cache_counts_samples(text, tmp_path):
    stage = CacheStage(
        kind="cache", data=text.data, batch_size=3, states={"shard_bytes": 20_000, "measured_samples": 4}
    )
    context = text_context(text, tmp_path)
    lengths = ["sample counted", RECORDS, 0, RECORDS]
    assert counted(stage, context) == [lengths, ["sample", RECORDS, 0, RECORDS]]
    drop(tmp_path / STATES, 0)
    (_, total, before, nothing), (_, samples, kept, done) = counted(stage, context)
    assert (total, before, nothing) == (RECORDS, 0, 0), "counts are kept, and nothing is counted again"
    assert samples == done == RECORDS and 0 < kept < RECORDS


def test_regenerate_counts_answers(text, tmp_path):
    stage = RegenerateStage(kind="regenerate", data=text.data, max_new_tokens=3, samples_per_shard=6, batch_size=4)
    context = text_context(text, tmp_path)
    assert counted(stage, context) == [["answer", RECORDS, 0, RECORDS]]
    drop(tmp_path / ANSWERS, 3)  # the last one holds two
    assert counted(stage, context) == [["answer", RECORDS, RECORDS - 2, RECORDS]]


def test_regenerate_counts_pictures(images, tmp_path):
    (tmp_path / "prompts.txt").write_text("one picture\nanother one\na third")
    stage = RegenerateStage(
        kind="regenerate", prompts={"path": str(tmp_path / "prompts.txt")}, repeats=2, samples_per_shard=4
    )
    assert counted(stage, image_context(tmp_path, images.target, images.inputs)) == [["picture", 6, 0, 6]]
