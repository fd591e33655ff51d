"""Sizes of models that a recipe spells out: what goes together passes, what no model has does not."""

import pytest
from draftsmith.core.errors import Refused
from draftsmith.models.inline import check_sizes, new_config
from fails import fails_with

CLIP = {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 48, "patch_size": 16}  # fmt: skip


@pytest.mark.parametrize("patch", [16, 48, 49])
def test_a_patch_is_as_large_as_the_picture_at_most(patch):
    if patch <= 48:
        assert new_config(CLIP | {"patch_size": patch}).patch_size == patch
        return
    fails_with("49 is more than image_size, 48", new_config, CLIP | {"patch_size": patch}, error=Refused)


@pytest.mark.parametrize("value", [0, 257, 10**6])
def test_sizes_inside_a_part_are_held_to_the_same_limits(value):
    whole = {"model_type": "llava", "text_config": {"model_type": "llama", "num_hidden_layers": 256}}
    check_sizes(whole)
    for values, key in (
        ({"num_hidden_layers": value}, "num_hidden_layers"),
        ({"text_config": {"num_hidden_layers": value}}, "text_config.num_hidden_layers"),
        ({"a": {"b": {"num_hidden_layers": value}}}, "a.b.num_hidden_layers"),
    ):
        caught = fails_with("should be 1 to 256", check_sizes, values, error=Refused)
        assert caught.key == key


def test_a_misspelt_key_inside_a_part_is_refused():
    """Of a config that holds configs. Parts of a section of a recipe are its own keys (`test_inline_keys.py`)."""
    small = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    whole = {"model_type": "llava", "text_config": small, "vision_config": CLIP}
    assert new_config(whole).text_config.hidden_size == 64
    for part, wrong in (("text_config", "hidden_sizes"), ("vision_config", "patch_sizes")):
        caught = fails_with("has no such key", new_config, whole | {part: whole[part] | {wrong: 64}}, error=Refused)
        assert caught.key == f"{part}.{wrong}"
