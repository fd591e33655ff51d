"""Pictures of Gemma 4: patches and prompts as transformers' own processor makes them."""

import pytest
import torch
from draftsmith.data.families.gemma import GEMMA
from draftsmith.data.pictures.videos import VideoSettings
from draftsmith.data.shapes.tokenizer import train_tokenizer
from fails import fails_with
from tiled import clip_pictures, image_picture, patches, picture
from transformers import Gemma4ImageProcessorPil

SIZES = [(16, 16), (40, 30), (90, 20), (24, 70), (300, 301), (400, 4), (1, 1)]
TEXTS = ["USER: Which picture? ASSISTANT: It is picture 1.\n", *(f"It is picture {n}." for n in range(10))] * 3


def processor(most: int = 70):
    return GEMMA.new(train_tokenizer(TEXTS, 420), patch_size=4, max_tokens=most)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("most", [70, 280])
def test_patches_are_those_of_transformers(size, most):
    made, image = processor(most), picture(size)
    theirs = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=3, max_soft_tokens=most)
    expected = theirs(images=image, return_tensors="pt")
    layout = image_picture(size, made)
    grid = layout.whole
    assert layout.num_tokens == int(expected["num_soft_tokens_per_image"][0]) <= most
    ours = patches([image], grid, made)
    real = expected["image_position_ids"][0, :, 0] >= 0
    assert (grid.rows, grid.columns) == tuple(int(n) + 1 for n in expected["image_position_ids"][0].amax(0).flip(0))
    torch.testing.assert_close(ours, expected["pixel_values"][0][real].float(), atol=1e-6, rtol=0)


def test_pixels_are_limited_from_above_alone():
    made = processor()
    assert image_picture((64, 64), made).num_tokens == 64
    assert image_picture((64, 64), made, max_pixels=16 * 12 * 12).num_tokens == 16
    assert image_picture((8, 8), made, max_pixels=10**9).num_tokens == 64
    fails_with("as many tokens as they may have", image_picture, (64, 64), made, min_pixels=100)
    assert image_picture((4000, 2), made, max_pixels=12 * 12).num_tokens == 1


def test_clips_and_other_tokenizers_are_refused():
    fails_with("read images alone", clip_pictures, None, VideoSettings(), processor())
    tokenizer = train_tokenizer(TEXTS, 420)
    made = GEMMA.new(tokenizer, patch_size=4)
    assert made.tokenizer.eos_token == "<turn|>" and made.num_image_tokens == 1
