"""What a stage is given."""

import pytest
from draftsmith.trainers.context import Context


@pytest.mark.parametrize("own", [None, "the draft's own"])
@pytest.mark.parametrize("model", ["target", "drafter", "captioner"])
def test_a_captioner_is_trained_with_the_image_processor_that_it_captions_with(model, own, monkeypatch):
    """It has the draft's tower, and at the target's resolution it would see nothing that it knows."""
    monkeypatch.setattr(Context, "processor", lambda self: "the target's")
    monkeypatch.setattr(Context, "own_image_processor", lambda self: own)
    expected = "the target's" if model == "target" or own is None else own
    assert Context.__new__(Context).processor_of(model) == expected
