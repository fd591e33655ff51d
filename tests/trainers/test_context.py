"""What a stage is given."""

import pytest
from draftsmith.models.drafters.lvlm import LvlmConfig
from draftsmith.trainers.run.context import Context
from tiled import processor


@pytest.mark.parametrize("own", [None, "the draft's own"])
@pytest.mark.parametrize("model", ["target", "drafter", "captioner"])
def test_a_captioner_is_trained_with_the_image_processor_that_it_captions_with(model, own, monkeypatch):
    """It has the draft's tower, and at the target's resolution it would see nothing that it knows."""
    monkeypatch.setattr(Context, "processor", lambda self: "the target's")
    monkeypatch.setattr(Context, "own_image_processor", lambda self: own)
    expected = "the target's" if model == "target" or own is None else own
    assert Context.__new__(Context).processor_of(model) == expected


def test_a_drafts_own_image_processor_has_the_size_of_its_tower(monkeypatch):
    """With a section in place of a name there are no files: the target's statistics stand in."""
    tower = {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8}
    drafter = LvlmConfig.model_construct(kind="lvlm", pictures="own", vision_tower=tower, newline=True)
    made, context = processor("llava"), Context.__new__(Context)
    object.__setattr__(context, "drafter", drafter)
    monkeypatch.setattr(Context, "processor", lambda self: made)
    own = context.own_image_processor()
    assert (own.image_size, own.patch_size, own.family) == (32, 8, "llava_onevision")
    assert own.tokenizer is made.tokenizer and made.image_size != 32
