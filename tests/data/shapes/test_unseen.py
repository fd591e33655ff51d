"""Pairs of a shape and a colour that the split held_out alone shows."""

import json

import pytest
from draftsmith.data.shapes.scene import COLORS, SHAPES
from draftsmith.data.shapes.write import sample, unseen_pairs, write_dataset
from draftsmith.trainers.stages.generate import GenerateStage
from fails import fails_with
from pydantic import ValidationError


def shown(scenario):
    return {(item.shape, item.color) for scene in (*scenario.scenes, *scenario.frames) for item in scene.objects}


@pytest.mark.parametrize("count", [1, 8, 24])
def test_pairs_leave_each_shape_and_each_colour_in_others(count):
    pairs = unseen_pairs(3, count)
    assert len(pairs) == count and pairs == unseen_pairs(3, count) != unseen_pairs(4, count)
    for shape in SHAPES:
        assert sum(s == shape for s, _ in pairs) <= -(-count // 6) < len(COLORS)
    for color in COLORS:
        assert sum(c == color for _, c in pairs) < len(SHAPES)


@pytest.mark.parametrize("kind", ["tale", "caption", "clip", "aside", "sums"])
def test_only_held_out_records_show_them(kind):
    pairs = unseen_pairs(5, 8)
    for index in range(40):
        train, held_out = (sample(5, split, kind, index, unseen=8) for split in ("train", "held_out"))
        assert not shown(train) & pairs and bool(shown(held_out) & pairs) == (kind != "sums")
        if not shown(sample(5, "train", kind, index)) & pairs:
            assert train == sample(5, "train", kind, index), "what fits already stays as it is"


def test_the_stage_writes_them(tmp_path):
    splits = {"train": {"tale": 20}, "held_out": {"tale": 10}}
    manifest = write_dataset(tmp_path / "some", seed=1, image_size=48, splits=splits, unseen=8)
    assert manifest["unseen"] == 8
    names = [f"a {color} {shape} " for shape, color in unseen_pairs(1, 8)]
    for split, expected in (("train", False), ("held_out", True)):
        for record in json.loads((tmp_path / "some" / f"{split}.json").read_text()):
            text = record["conversations"][-1]["value"]
            assert any(name in text for name in names) == expected


def test_it_is_a_setting_of_conversations_with_such_a_split():
    stage = {"kind": "generate", "splits": {"train": {"name": 1}, "held_out": {"name": 1}}}
    assert "unseen" not in GenerateStage.model_validate(stage).model_dump(), "unset it changes no fingerprint"
    assert GenerateStage.model_validate(stage | {"unseen": 8}).model_dump()["unseen"] == 8
    with pytest.raises(ValidationError, match="there is none"):
        GenerateStage.model_validate({"kind": "generate", "splits": {"train": {"name": 1}}, "unseen": 8})
    fails_with("unseen", GenerateStage.model_validate, stage | {"unseen": 25}, error=ValidationError)
