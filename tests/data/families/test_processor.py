"""Processors of the three families: written, read again, and loaded by transformers where that needs no torchvision."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.data.conversations import PromptFormat, encode
from draftsmith.data.families.table import PICTURE_FAMILIES
from draftsmith.data.processor_files import load_processor, with_own_image_processor
from fails import fails_with
from tiled import check_saved, layouts, picture, pixels, processor
from transformers import AutoProcessor, AutoTokenizer, LlavaNextProcessor, LlavaProcessor, SiglipImageProcessorPil

SIZES = [(40, 30), (90, 20), (24, 24)]


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision"])
def test_a_saved_processor_is_read_again(family, tmp_path):
    check_saved(processor(family), tmp_path, "square", "pad", "anyres", "anyres_max_9")


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
    assert (own_processor.image_size, own_processor.family,
            own_processor.tokenizer_hash) == (16, "llava_onevision", made.tokenizer_hash)  # fmt: skip
    assert pixels([picture((9, 30))], own_processor, "square").shape == (1, 3, 16, 16), "SigLIP squeezes"
    assert list(own_processor.image_processor.image_std) == [0.25] * 3
    with pytest.raises(UserError, match=r"cannot read processor_config\.json of"):
        with_own_image_processor(
            made, str(tmp_path / "none"), image_size=16, patch_size=8, family="llava", revision=None
        )


CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]


@pytest.mark.parametrize(("family", "vision", "mean"), [
    ("llava", {"model_type": "clip_vision_model", "image_size": 24, "patch_size": 8}, CLIP_MEAN),
    ("llava_next", {"model_type": "clip_vision_model", "image_size": 24, "patch_size": 8}, CLIP_MEAN),
    ("llava_onevision", {"model_type": "siglip_vision_model", "image_size": 24, "patch_size": 8}, [0.5] * 3),
])  # fmt: skip
def test_without_image_settings_the_published_ones_are_taken(family, vision, mean, tmp_path):
    made = processor(family)
    made.tokenizer.save_pretrained(tmp_path)
    pinpoints = [[24, 48], [48, 24]]
    config = {"model_type": family, "vision_config": vision, "image_grid_pinpoints": pinpoints}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = load_processor(tmp_path)
    assert (result.family, result.image_size, result.patch_size) == (family, 24, 8)
    assert list(result.image_processor.image_mean) == mean and result.image_processor.resample == 3
    assert result.resolutions == ((24, 48), (48, 24))
    assert pixels([picture((40, 30))], result, "pad").shape == (1, 3, 24, 24)


@pytest.mark.parametrize(("family", "patch", "least"), [("qwen2_5_vl", 14, 3136), ("qwen3_vl", 16, 65536)])
def test_without_image_settings_qwens_are_the_published_ones(family, patch, least, tmp_path):
    tokenizer = processor("llava").tokenizer
    made = PICTURE_FAMILIES[family].new(tokenizer, patch_size=patch, min_pixels=4, max_pixels=9,
                                image_mean=(0, 0, 0), image_std=(1, 1, 1))  # fmt: skip
    made.tokenizer.save_pretrained(tmp_path)
    # What processors of transformers and vLLM expand at a picture.
    assert AutoTokenizer.from_pretrained(tmp_path).image_token == "<|image_pad|>"
    vision = {"patch_size": patch, "spatial_merge_size": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vision_config": vision}))
    result = load_processor(tmp_path)
    assert (result.family, result.patch_size, result.image_size) == (family, patch, 2 * patch)
    assert result.image_processor.size["shortest_edge"] == least
    assert list(result.image_processor.image_mean) == (CLIP_MEAN if family == "qwen2_5_vl" else [0.5] * 3)


def test_a_tower_without_published_settings_is_refused_with_the_file_to_write(tmp_path):
    processor("llava").tokenizer.save_pretrained(tmp_path)
    config = {"model_type": "llava", "vision_config": {"model_type": "own_vision", "image_size": 30, "patch_size": 5}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = fails_with("has no preprocessor_config", load_processor, tmp_path)
    path, text = re.search(r"write (\S+) .*?(\{.*\})", refused.hint).groups()
    Path(path).write_text(text)
    assert load_processor(tmp_path).image_size == 30, "what the message prints is what loads"


@pytest.mark.parametrize("file", ["processor_config.json", "preprocessor_config.json", "tokenizer_config.json"])
def test_an_unknown_processor_class_is_refused_with_its_file(file, tmp_path):
    processor("llava").save(tmp_path)
    _name_class(tmp_path, file, "Idefics3Processor")
    refused = fails_with("processor_class is Idefics3Processor", load_processor, tmp_path)
    assert refused.where == f"{tmp_path / file}, key processor_class"
    assert "LlavaNextProcessor" in refused.hint and "Qwen2_5_VLProcessor" in refused.hint
    assert load_processor(tmp_path, family=PICTURE_FAMILIES["llava"]).family == "llava", (
        "the caller says what reads them"
    )
    assert load_processor(tmp_path, text_only=True).image_processor is None


@pytest.mark.parametrize("name", [None, "LlavaProcessor", "CLIPProcessor", "SiglipProcessor"])
def test_files_without_a_class_or_with_the_tower_s_are_llava_s(name, tmp_path):
    processor("llava").save(tmp_path)
    _name_class(tmp_path, "preprocessor_config.json", name)
    assert load_processor(tmp_path).family == "llava"


def _name_class(folder, file, name):
    """Let this file alone name the processor's class."""
    for other in {"processor_config.json", "tokenizer_config.json", file}:
        path = folder / other
        settings = json.loads(path.read_text()) if path.exists() else {}
        settings.pop("processor_class", None)
        path.write_text(json.dumps(settings | ({"processor_class": name} if other == file and name else {})))


def test_a_patch_size_that_the_processor_s_files_leave_out_is_the_model_s(tmp_path):
    made = processor("llava")
    made.save(tmp_path)
    path = tmp_path / "processor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": None}))
    fails_with("say patch_size", load_processor, tmp_path)
    vision = {"model_type": "clip_vision_model", "image_size": 24, "patch_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "vision_config": vision}))
    assert load_processor(tmp_path).patch_size == 8
