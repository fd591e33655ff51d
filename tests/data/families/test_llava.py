"""Pictures become the pixels of the official recipe, against a few lines written from its description."""

import numpy as np
import pytest
import torch
from draftsmith.data.families.llava import expand_to_square
from PIL import Image
from tiled import pixels

SIZE = 24
SHAPES = [(60, 20), (20, 60), (61, 24), (24, 61), (37, 37), (25, 24), (7, 5), (24, 24), (1, 1)]


def picture(width: int, height: int) -> Image.Image:
    """A different colour at every place."""
    values = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def clip(image: Image.Image, processor) -> torch.Tensor:
    """CLIP: shorter edge to SIZE (bicubic), the middle SIZE x SIZE cut out, scaled to [0, 1], normalised."""
    width, height = image.size
    short = min(width, height)
    image = image.resize((int(SIZE * width / short), int(SIZE * height / short)), Image.Resampling.BICUBIC)
    left, top = (image.width - SIZE) // 2, (image.height - SIZE) // 2
    values = np.asarray(image.crop((left, top, left + SIZE, top + SIZE))).astype(np.float64) / 255
    mean, std = processor.image_processor.image_mean, processor.image_processor.image_std
    return torch.from_numpy((values - mean) / std).permute(2, 0, 1).float()


def padded(image: Image.Image, mean) -> Image.Image:
    """The official `expand2square`, pixel by pixel."""
    side = max(image.size)
    canvas = np.empty((side, side, 3), dtype=np.uint8)
    canvas[:] = [int(x * 255) for x in mean]
    left, top = (side - image.width) // 2, (side - image.height) // 2
    canvas[top : top + image.height, left : left + image.width] = np.asarray(image)
    return Image.fromarray(canvas)


@pytest.mark.parametrize("shape", SHAPES)
def test_square_cuts_the_longer_side(processor, shape):
    image = picture(*shape)
    pixel_values = pixels([image], processor, "square")
    assert pixel_values.dtype == torch.float32 and pixel_values.shape == (1, 3, SIZE, SIZE)
    torch.testing.assert_close(pixel_values[0], clip(image, processor), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_pad_keeps_the_whole_picture_on_the_mean_colour(processor, shape):
    image = picture(*shape)
    mean = processor.image_processor.image_mean
    expected = padded(image, mean)
    assert np.array_equal(np.asarray(expand_to_square(image, tuple(mean))), np.asarray(expected))
    pixel_values = pixels([image], processor, "pad")
    torch.testing.assert_close(pixel_values[0], clip(expected, processor), atol=1e-5, rtol=0)
    if shape == (60, 20):
        assert pixel_values[0, :, [0, -1]].abs().max() < 0.05, "the bars are the mean: zero after normalisation"
        assert not torch.equal(pixel_values, pixels([image], processor, "square"))


def test_several_pictures_keep_their_order(processor):
    images = [picture(*shape) for shape in SHAPES]
    together = pixels(images, processor, "pad")
    assert torch.equal(together, torch.cat([pixels([image], processor, "pad") for image in images]))
