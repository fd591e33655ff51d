"""Pictures side by side in one file: what decoding drew.

Letters: B pictures, S side in pixels.
"""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image
from torch import Tensor


def save_grid(path: Path, pictures: Tensor, *, columns: int | None = None, scale: int | None = None) -> None:
    """uint8 [B,3,S,S] as one PNG, row by row.

    Args:
        columns: pictures in a row; None makes the grid about square.
        scale: each pixel becomes so many; None enlarges small pictures to about 96 pixels.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    side = pictures.shape[-1]
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    scale = scale or max(1, 96 // side)
    gap = 2
    rows = math.ceil(len(pictures) / columns)
    cell = side * scale + gap
    sheet = Image.new("RGB", (columns * cell - gap, rows * cell - gap), (200, 200, 200))
    for number, picture in enumerate(pictures.permute(0, 2, 3, 1).cpu().numpy()):
        row, column = divmod(number, columns)
        image = Image.fromarray(picture).resize((side * scale, side * scale), Image.Resampling.NEAREST)
        sheet.paste(image, (column * cell, row * cell))
    sheet.save(path)
