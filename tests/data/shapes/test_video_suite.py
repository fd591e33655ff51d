"""The synthetic dataset's substitutes for the sets of videos, pictures and texts."""

import json

import pytest
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.pictures.videos import Clip, VideoSettings
from draftsmith.data.records.record import check_record
from draftsmith.data.shapes.scene import COLORS
from draftsmith.data.shapes.suites import CLIPS, length_set
from draftsmith.data.shapes.write import sample, write_dataset
from draftsmith.data.suites.benchmark_sets import BENCHMARK_SETS
from draftsmith.data.suites.suite import Suite
from draftsmith.trainers.evaluate.requests import at_length

LENGTHS = (4, 9)


def write(folder):
    write_dataset(folder, seed=7, image_size=24, splits={"train": {"clip": 2}}, video_suite=3, lengths=LENGTHS)
    return folder


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    return write(tmp_path_factory.mktemp("videos") / "world")


@pytest.fixture
def suite(synthetic, tmp_path):
    return Suite(synthetic / "video_suite", tmp_path / "cache")


def test_a_longer_clip_is_the_same_story_told_slowly():
    for index in range(20):
        short, usual, long = (sample(7, "train", "clip", index, num_frames=n) for n in (4, None, 64))
        assert short == usual and long.turns == short.turns and len(long.frames) == 64
        assert (long.frames[0], long.frames[-1]) == (short.frames[0], short.frames[-1])
        kept = [frame for frame, before in zip(long.frames, (None, *long.frames), strict=False) if frame != before]
        assert [f for f in dict.fromkeys(short.frames) if f not in kept] == [] or len(kept) >= 2
    assert sample(7, "train", "caption", 0, num_frames=9) == sample(7, "train", "caption", 0)


def test_facts_are_told_early_and_late():
    """Early: the second word differs from clip to clip. Late: ten words and more are alike in all of them."""
    answers = {kind: [sample(7, "train", kind, index).turns[0][1].split() for index in range(60)]
               for kind in ("clip", "clip_late")}  # fmt: skip
    first_fact = {
        kind: next(place for place, words in enumerate(zip(*some, strict=False)) if len({*words}) > 1)
        for kind, some in answers.items()
    }
    assert first_fact == {"clip": 1, "clip_late": 22}
    assert len({words[1] for words in answers["clip"]}) == len(COLORS)
    questions = {sample(7, "train", kind, 0).turns[0][0] for kind in answers}
    assert len(questions) == 2, "what is asked says which way of telling is meant"


def test_a_suite_has_a_set_of_each_way_of_telling_at_each_length(tmp_path):
    kinds = ("clip", "clip_late")
    write_dataset(tmp_path / "both", seed=7, image_size=24, splits={"train": {"clip": 1}}, video_suite=2,
                  lengths=LENGTHS, clip_kinds=kinds)  # fmt: skip
    suite = Suite(tmp_path / "both" / "video_suite", tmp_path / "cache")
    assert [name for name in suite.about.sets
            if name not in BENCHMARK_SETS] == ["clips-4", "clips-9", "late-4", "late-9"]  # fmt: skip
    for kind in kinds:
        short, long = (suite.first_turns(length_set(frames, kind), "describe", None) for frames in LENGTHS)
        turns = [sample(7, CLIPS, kind, index).turns[0][1] for index in range(2)]
        assert [r["conversations"][-1]["value"] for r in short] == turns
        assert [r["conversations"] for r in long] == [r["conversations"] for r in short]
        assert len(Clip(suite.folder / long[0]["video"][0], VideoSettings(fps=None)).numbers) == LENGTHS[1]


def test_lengths_share_their_stories(suite):
    short, long = (suite.first_turns(length_set(frames), "describe", None) for frames in LENGTHS)
    assert [r["conversations"] for r in short] == [r["conversations"] for r in long]
    assert len({r["video"][0] for r in short + long}) == 6
    for records, frames in ((short, LENGTHS[0]), (long, LENGTHS[1])):
        for result in records:
            assert len(Clip(suite.folder / result["video"][0], VideoSettings(fps=None)).numbers) == frames


def test_the_synthetic_dataset_stands_in_for_every_set_in_both_ways_to_ask(suite):
    assert BENCHMARK_SETS.keys() <= suite.about.sets.keys()
    for name, about in BENCHMARK_SETS.items():
        long, stock = (suite.first_turns(name, way, None) for way in ("describe", "stock"))
        assert [check_record(r) for r in long + stock] == [None] * 6
        medium = "video" if "video" in long[0] else "image" if "image" in long[0] else "text"
        assert medium == about.medium == suite.group(name)
        if about.stock == "letter":
            for result in stock:
                text, letter = result["conversations"][0]["value"], result["letter"]
                assert f"\n{letter}. {result['references'][0]}\n" in text
        if about.describe == "describe":
            own = {"video": "<video>\nWhat happens in the clip?", "image": "<image>\nDescribe the picture."}
            assert {result["conversations"][0]["value"] for result in long} == {own[medium]}
    letters = {result["letter"] for name in ("MVBench", "MLVU", "VideoMME") for result in suite.rows(name)}
    assert len(letters) > 1, "the right option is not always the first"


def test_a_budget_takes_so_many_frames_of_a_long_clip(suite, processor, tmp_path):
    file = tmp_path / "asked.json"
    file.write_text(json.dumps(suite.first_turns(length_set(9), "verbatim", None)))
    tokens = []
    for budget in (8, 20, 1000):
        video, _ = at_length(VideoSettings(newline="none"), str(budget), processor, [])
        data = ConversationData(path=str(file), images=str(suite.folder), aspect="square", video=video)
        form = PromptFormat(system="", image_rule="verbatim")
        dataset = ConversationDataset(data, form, processor, files=[file], skipped_log=None, cache=tmp_path / "cache")
        tokens.append(int((dataset.request(0)[0].modality != 0).sum()))
    # Frames of four tokens; the clip has nine, and gives no more.
    assert tokens == [8, 20, 36]


def test_the_suite_is_a_function_of_the_seed_and_moves_nothing_else(synthetic, tmp_path):
    again = write(tmp_path / "again")
    for path in sorted(p for p in synthetic.rglob("*") if p.is_file()):
        assert (again / path.relative_to(synthetic)).read_bytes() == path.read_bytes(), path
    plain = tmp_path / "plain"
    write_dataset(plain, seed=7, image_size=24, splits={"train": {"clip": 2}})
    for path in (p for p in plain.rglob("*") if p.is_file()):
        assert (synthetic / path.relative_to(plain)).read_bytes() == path.read_bytes(), path
    longer = tmp_path / "longer"
    write_dataset(longer, seed=7, image_size=24, splits={"train": {"clip": 2}}, clip_frames={"train": 9})
    assert json.loads((longer / "train.json").read_text()) == json.loads((synthetic / "train.json").read_text())
    assert len(Clip(longer / "videos/train/clip-000000.mp4", VideoSettings()).numbers) == 9
