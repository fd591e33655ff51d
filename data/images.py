"""Pictures to pixels exactly as the official recipe: `square` in pretraining, `pad` in finetuning.

`square` is CLIP's own processing (shortest edge, centre crop); `pad` first extends the picture to a
square with the mean colour, so that nothing is cut off (LLaVA-1.5, `image_aspect_ratio`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from ..core.errors import UserError
from .processor import Processor

Aspect = Literal["square", "pad"]


def load_image(path: Path) -> Image.Image:
    """An RGB picture. Raises `UserError` naming the file where it is missing, broken or a decompression bomb."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError as error:
        raise UserError(
            "missing image", where=str(path), cure="check the `images` folder of the data section"
        ) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"corrupt image: {error}", where=str(path), cure="replace or remove the file") from error


def expand_to_square(image: Image.Image, mean: tuple[float, ...]) -> Image.Image:
    """The picture centred on a square canvas of its longer side, filled with the mean colour."""
    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    canvas = Image.new("RGB", (side, side), tuple(int(channel * 255) for channel in mean))
    canvas.paste(image, ((side - width) // 2, (side - height) // 2))
    return canvas


def pixels(images: list[Image.Image], processor: Processor, aspect: Aspect) -> Tensor:
    """Normalised pixels [I,3,S,S] float32."""
    if aspect == "pad":
        images = [expand_to_square(image, tuple(processor.image_processor.image_mean)) for image in images]
    values = processor.image_processor(images=images, return_tensors="np")["pixel_values"]
    return torch.from_numpy(values).float()
