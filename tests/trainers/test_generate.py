"""Settings of the synthetic dataset that name clips."""

import pytest
from draftsmith.trainers.stages.generate import GenerateStage
from fails import fails_with
from pydantic import ValidationError


def stage(**settings) -> GenerateStage:
    return GenerateStage.model_validate({"kind": "generate", "splits": {"moves": {"clip": 2}}, **settings})


def test_lengths_of_clips_are_checked():
    assert stage(clip_frames={"moves": 16}, video_suite=2, clip_lengths=[2, 8]).clip_lengths == [2, 8]
    for settings, told in (
        ({"clip_frames": {"move": 16}}, r"names split 'move': did you mean 'moves'"),
        ({"clip_frames": {"moves": 1}}, r"clip_frames.moves\n.*greater than or equal to 2"),
        ({"clip_lengths": [4, 1]}, r"clip_lengths.1\n.*greater than or equal to 2"),
        ({"clip_lengths": [4, 4]}, r"twice: \[4, 4\]"),
        ({"clip_lengths": []}, "clip_lengths"),
        ({"clip_kinds": ["late"]}, r"clip_kinds.0\n.*'clip' or 'clip_late'"),
        ({"clip_kinds": ["clip", "clip"]}, "clip_kinds name one twice"),
    ):
        fails_with(told, stage, **settings, error=ValidationError)


def test_ways_of_telling_are_asked_for_by_name():
    """Left at its default the key changes no stored settings, so that finished runs are not stale."""
    assert "clip_kinds" not in stage(video_suite=2).model_dump()
    assert stage(clip_kinds=["clip", "clip_late"]).model_dump()["clip_kinds"] == ["clip", "clip_late"]


@pytest.mark.parametrize("suite", [{"suite": 2}, {"video_suite": 2}])
def test_no_split_holds_the_records_that_a_suite_asks(suite):
    for split in ("clips", "suite-GQA"):
        if split == "clips" and "suite" in suite:
            assert stage(splits={split: {"clip": 2}}, **suite).suite == 2  # that suite has no clips
            continue
        with pytest.raises(ValidationError, match=f"splits.{split} would hold the very records that the suite asks"):
            stage(splits={split: {"clip": 2}}, **suite)
    assert stage(splits={"clips": {"clip": 2}}).video_suite == 0
