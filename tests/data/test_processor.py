"""Processors of the three families: written, read again, and loaded by transformers where that needs no torchvision."""

from dataclasses import replace

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.data.conversations import PromptFormat, encode
from draftsmith.data.images import layouts, pixels
from draftsmith.data.processor import load_processor, with_own_image_processor
from tiled import TEXTS, picture, processor
from transformers import AutoProcessor, LlavaNextProcessor, LlavaProcessor, SiglipImageProcessorPil

SIZES = [(40, 30), (90, 20), (24, 24)]


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision"])
def test_a_saved_processor_is_read_again(family, tmp_path):
    made = processor(family)
    made.save(tmp_path)
    result = load_processor(tmp_path)
    for name in ("image_token_id", "video_token_id", "patch_size", "image_size", "pad_id", "eos_id", "newline_id",
                 "family", "patches", "tokenizer_hash"):  # fmt: skip
        assert getattr(result, name) == getattr(made, name), name
    assert result.tokenizer(TEXTS[1]).input_ids == made.tokenizer(TEXTS[1]).input_ids
    for aspect in ("square", "pad", "anyres", "anyres_max_9"):
        assert torch.equal(pixels([picture(SIZES[1])], result, aspect), pixels([picture(SIZES[1])], made, aspect))


def test_resolutions_of_the_files_are_used(tmp_path):
    """A family's own list, where its files name one."""
    made = replace(processor("llava_next"), resolutions=((24, 48), (48, 24)))
    made.save(tmp_path)
    result = load_processor(tmp_path)
    assert result.resolutions == ((24, 48), (48, 24))
    assert layouts([(40, 40)], result, "anyres")[0].num_tiles == 3
    assert layouts([(40, 40)], processor("llava_next"), "anyres")[0].num_tiles == 5


@pytest.mark.parametrize(("family", "kind"), [("llava", LlavaProcessor), ("llava_next", LlavaNextProcessor)])
def test_transformers_loads_it_and_makes_the_same(family, kind, tmp_path):
    """Ids and pixels of one prompt with a picture; nothing of torchvision is there."""
    made = processor(family)
    made.save(tmp_path)
    published = AutoProcessor.from_pretrained(tmp_path)
    assert type(published) is kind
    for size in SIZES:
        image, aspect = picture(size), "square" if family == "llava" else "anyres"
        given = published(text="USER: <image>\nWhich picture? ASSISTANT:", images=image, return_tensors="pt")
        form = PromptFormat(system="", image_rule="verbatim", image_join="hf")
        question = [{"from": "human", "value": "<image>\nWhich picture?"}]
        encoded = encode(question, form, made, pictures=layouts([size], made, aspect), open_ended=True)
        assert encoded.ids == given["input_ids"][0].tolist()
        expected = given["pixel_values"] if family == "llava" else given["pixel_values"][0]
        assert torch.equal(pixels([image], made, aspect), expected)


def test_own_image_processor_from_a_tower_s_files(tmp_path):
    statistics = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    SiglipImageProcessorPil(size={"height": 16, "width": 16}, **statistics).save_pretrained(tmp_path)
    made = processor("llava")
    own_processor = with_own_image_processor(
        made, str(tmp_path), image_size=16, patch_size=8, family="llava_onevision", revision=None
    )
    assert (own_processor.image_size, own_processor.family, own_processor.tokenizer_hash) == (
        16,
        "llava_onevision",
        made.tokenizer_hash,
    )
    assert pixels([picture((9, 30))], own_processor, "square").shape == (1, 3, 16, 16), "SigLIP squeezes"
    assert list(own_processor.image_processor.image_std) == [0.25] * 3
    with pytest.raises(UserError, match="cannot load image processor"):
        with_own_image_processor(
            made, str(tmp_path / "none"), image_size=16, patch_size=8, family="llava", revision=None
        )
