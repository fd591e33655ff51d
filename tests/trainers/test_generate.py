"""Settings of the synthetic dataset that name clips."""

import pytest
from draftsmith.trainers.stages.generate import GenerateStage
from pydantic import ValidationError


def stage(**settings) -> GenerateStage:
    return GenerateStage.model_validate({"kind": "generate", "splits": {"clips": {"clip": 2}}, **settings})


def test_lengths_of_clips_are_checked():
    assert stage(clip_frames={"clips": 16}, video_suite=2, clip_lengths=[2, 8]).clip_lengths == [2, 8]
    for settings, told in (
        ({"clip_frames": {"clip": 16}}, r"names split 'clip'; did you mean 'clips'"),
        ({"clip_frames": {"clips": 1}}, r"clip_frames.clips\n.*greater than or equal to 2"),
        ({"clip_lengths": [4, 1]}, r"clip_lengths.1\n.*greater than or equal to 2"),
        ({"clip_lengths": [4, 4]}, r"found \[4, 4\]"),
        ({"clip_lengths": []}, "clip_lengths"),
    ):
        with pytest.raises(ValidationError, match=told):
            stage(**settings)
