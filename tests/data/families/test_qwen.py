"""Pictures read whole: sizes, patches and prompts of Qwen-VL, against transformers' PIL image processor and by hand."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import IMAGE, TEXT, VIDEO, PatchGrid
from draftsmith.data.conversations import PromptFormat, encode
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.families.processor import NO_TOKEN
from draftsmith.data.families.qwen import rounded
from draftsmith.data.families.table import PICTURE_FAMILIES
from draftsmith.data.pictures.videos import Clip, VideoSettings, write_clip
from draftsmith.data.processor_files import load_processor
from draftsmith.data.shapes.tokenizer import train_tokenizer
from fails import fails_with
from PIL import Image
from small_records import talk
from tiled import MEAN, STD, TEXTS, check_saved, clip_pictures, image_picture, patches, picture

FORM = PromptFormat(template="qwen_vl", image_rule="verbatim")
TOKENIZER = train_tokenizer(TEXTS, 420)


def processor(family: str = "qwen2_5_vl", **limits):
    limits = {"min_pixels": 64, "max_pixels": 1024} | limits
    return PICTURE_FAMILIES[family].new(
        copy.deepcopy(TOKENIZER), patch_size=4, image_mean=MEAN, image_std=STD, **limits
    )


def frames(count: int, size=(20, 12)) -> list[Image.Image]:
    return [picture(size, seed) for seed in range(count)]


def clip(tmp_path: Path, count: int, size=(20, 12), fps: int = 4, **settings) -> Clip:
    # Flat colours survive an encoder.
    colours = [Image.new("RGB", size, (40 * n % 256, 90, 200 - 10 * n)) for n in range(count)]
    write_clip(tmp_path / "clip.mp4", colours, fps=fps)
    return Clip(tmp_path / "clip.mp4", VideoSettings(fps=None, num_frames=count, **settings))


def test_sides_become_multiples_within_the_limits():
    assert rounded((640, 480), 28, 3136, 12845056) == (644, 476)
    assert rounded((640, 480), 28, 3136, 200704) == (504, 364) and rounded((40, 20), 28, 3136, 10**6) == (84, 56)
    fails_with("200 times", rounded, (3, 700), 28, 3136, 10**6)


@pytest.mark.parametrize("size", [(20, 12), (33, 50), (8, 8), (3, 40), (1, 1)])
def test_patches_of_an_image_are_those_of_transformers(size):
    made, image = processor(), picture(size)
    given = made.image_processor(images=[image], return_tensors="pt")
    layout = image_picture(size, made)
    grid = layout.whole
    assert [grid.frames, grid.rows, grid.columns] == given["image_grid_thw"][0].tolist()
    assert layout.num_tokens == grid.rows * grid.columns // 4 and layout.num_tiles == len(given["pixel_values"])
    result = patches([image], grid, made)
    torch.testing.assert_close(result, given["pixel_values"], atol=1e-5, rtol=0)


def test_limits_of_the_data_section_come_first():
    made = processor()
    assert image_picture((400, 400), made).num_tokens == 1024 // 64
    assert image_picture((400, 400), made, max_pixels=256).num_tokens == 4
    assert image_picture((8, 8), made, min_pixels=1024, max_pixels=1024).num_tokens == 16


def test_patches_of_a_clip_frame_by_frame():
    """[pair, row, column] of tokens, 2 x 2 patches of each, [channel, frame, row, column] of a patch: by loops."""
    made, shown = processor(), frames(3, (16, 8))
    grid = PatchGrid(2, 2, 4)
    actual = patches(shown, grid, made)
    raw = np.stack([np.asarray(f, np.float32) for f in [*shown, shown[-1]]]) / 255
    raw = (raw - np.array(MEAN)) / np.array(STD)
    expected = []
    for pair in range(2):
        for row in range(0, 2, 2):
            for column in range(0, 4, 2):
                for r in (row, row + 1):
                    for c in (column, column + 1):
                        cut = raw[2 * pair : 2 * pair + 2, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4]
                        expected.append(cut.transpose(3, 0, 1, 2).ravel())
    torch.testing.assert_close(actual, torch.tensor(np.stack(expected), dtype=torch.float32), atol=1e-5, rtol=0)
    # A clip whose frames are all the same is its image over and over.
    still = patches([shown[0]] * 4, grid, made).view(2, 8, -1)
    torch.testing.assert_close(still[0], patches([shown[0]], replace(grid, frames=1), made))


def test_a_clip_knows_its_seconds(tmp_path):
    one = clip(tmp_path, 7, fps=4)
    assert (one.size, one.rate, one.total) == ((20, 12), 4, 7)
    (whole,) = clip_pictures(one, VideoSettings(min_pixels=64, max_pixels=1024), processor("qwen2_5_vl"))
    grid = whole.whole
    assert (whole.modality, grid.frames, grid.seconds, grid.timestamp) == (VIDEO, 4, 0.5, None)
    parts = clip_pictures(one, VideoSettings(min_pixels=64, max_pixels=1024), processor("qwen3_vl"))
    assert [p.whole.timestamp for p in parts] == [0.125, 0.625, 1.125, 1.5]  # the last frame twice
    assert [p.whole.part for p in parts] == [0, 1, 2, 3] and {p.whole.frames for p in parts} == {1}
    assert sum(p.num_tokens for p in parts) == whole.num_tokens


def test_frames_shrink_to_the_tokens_of_a_clip(tmp_path):
    one, made = clip(tmp_path, 8, size=(160, 160)), processor()
    free = clip_pictures(one, VideoSettings(min_pixels=64, max_pixels=64 * 100), made)[0]
    assert free.num_tokens == 4 * 100
    tight = clip_pictures(one, VideoSettings(min_pixels=64, max_pixels=64 * 100, max_tokens=40), made)[0]
    assert tight.num_tokens == 36 and VideoSettings().pixel_limits(64, 28) == (128 * 784, 768 * 784)
    assert VideoSettings().pixel_limits(768, 28) == (128 * 784, 115_200 * 784 * 2 // 768)
    assert VideoSettings(max_pixels=1000).pixel_limits(4, 28) == (1000, 1000)


def turns(text: str, answer: str = "It is picture 3.") -> list[dict]:
    return talk(text, answer)


def test_a_prompt_is_chatml_with_marks_around_pictures():
    made = processor()
    layout = image_picture((20, 12), made)
    encoded = encode(turns("<image>\nWhich picture is this?"), FORM, made, pictures=[layout])
    assert encoded.text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><image><|vision_end|>Which picture is this?<|im_end|>\n"
        "<|im_start|>assistant\nIt is picture 3.<|im_end|>\n"
    )
    run = [i for i, kind in enumerate(encoded.modality) if kind == IMAGE]
    assert len(run) == layout.num_tokens and run == list(range(run[0], run[-1] + 1))
    assert {encoded.ids[i] for i in run} == {made.image_token_id}
    assert (encoded.ids[run[0] - 1], encoded.ids[run[-1] + 1]) == (made.vision_start_id, made.vision_end_id)
    answer = [token for token, counts in zip(encoded.ids, encoded.loss_mask, strict=True) if counts]
    assert answer[-1] == made.eos_id and "It is picture 3." in made.tokenizer.decode(answer)
    hf = encode(
        turns("<image>\nWhich picture is this?"), FORM.model_copy(update={"image_join": "hf"}), made, pictures=[layout]
    )
    assert hf.ids == encoded.ids
    # One function for training and decoding: the prompt is where the answer begins.
    asked = encode(turns("<image>\nWhich picture is this?"), FORM, made, pictures=[layout], open_ended=True)
    assert asked.ids == encoded.ids[: len(asked.ids)] and encoded.loss_mask.index(True) == len(asked.ids)


def test_times_before_the_frames_of_a_clip(tmp_path):
    made, settings = processor("qwen3_vl"), VideoSettings(min_pixels=64, max_pixels=256)
    parts = clip_pictures(clip(tmp_path, 4), settings, made)
    image = image_picture((8, 8), made)
    encoded = encode(turns("<video>\nAnd <image>?"), FORM, made, pictures=[*parts, image], open_ended=True)
    shown = "<|vision_start|><video><|vision_end|>"
    assert encoded.text == (
        f"<|im_start|>user\n<0.1 seconds>{shown}<0.6 seconds>{shown}And <|vision_start|><image><|vision_end|>?"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert encoded.modality.count(VIDEO) == sum(p.num_tokens for p in parts)
    assert encoded.modality.count(IMAGE) == image.num_tokens
    fails_with("marks for", encode, turns("<video>"), FORM, made, pictures=[*parts, image])


def test_templates_and_processors_that_do_not_fit():
    made = processor()
    with pytest.raises(UserError, match="template qwen and a processor of qwen2_5_vl"):
        encode(turns("Which?"), PromptFormat(template="qwen"), made)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_saved_processor_is_read_again(family, tmp_path):
    check_saved(processor(family, max_pixels=512), tmp_path)


def test_a_text_only_processor(tmp_path):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]}
    )
    tokenizer.eos_token = "<|eot_id|>"
    tokenizer.save_pretrained(tmp_path)
    made = load_processor(tmp_path, text_only=True)
    assert (made.family, made.image_token_id, made.bos_id) == ("causal_lm", NO_TOKEN, 1)
    encoded = encode(turns("Which picture is this?"), PromptFormat(template="llama3"), made)
    assert encoded.text == (
        "<|start_header_id|>user<|end_header_id|>\n\nWhich picture is this?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nIt is picture 3.<|eot_id|>"
    )
    assert encoded.ids[0] == 1 and encoded.loss_mask[-1] and set(encoded.modality) == {TEXT}
    fails_with("ends turns with", encode, turns("Which?"), PromptFormat(template="v1"), made)


def test_records_with_images_and_clips_as_requests(tmp_path):
    picture((20, 12)).save(tmp_path / "a.png")
    clip(tmp_path, 6)
    record = {
        "id": 1, "image": "a.png", "video": "clip.mp4",
        "conversations": turns("<image>\nThis, and <video>\nwhat?"),
    }  # fmt: skip
    (tmp_path / "all.json").write_text(json.dumps([record]))
    for family in ("qwen2_vl", "qwen3_vl"):
        made = processor(family)
        section = ConversationData(
            path="x", max_pixels=512, video={"fps": None, "num_frames": 6, "min_pixels": 64, "max_pixels": 128}
        )
        data = ConversationDataset(
            section, FORM, made, files=[tmp_path / "all.json"], skipped_log=None, cache=tmp_path / f"c{family}"
        )
        asked, answer = data.request(0)
        assert answer == "It is picture 3." and data.num_ids(0, prompt=True) == len(asked.ids)
        assert asked.pixels.shape == (sum(p.num_tiles for p in asked.pictures), 3 * 2 * 4 * 4)
        kinds = [p.modality for p in asked.pictures]
        assert kinds == [IMAGE, VIDEO] if family == "qwen2_vl" else [IMAGE, VIDEO, VIDEO, VIDEO]
        assert [int((asked.modality == kind).sum()) for kind in (IMAGE, VIDEO)] == [
            sum(p.num_tokens for p in asked.pictures if p.modality == kind) for kind in (IMAGE, VIDEO)
        ]
        assert len(data[0].ids) > len(asked.ids) and torch.equal(data[0].pixels, asked.pixels)
