"""Figures of every report are files that show something, at a README's size."""

import pytest
import torch
from draftsmith.eval.figures import acceptance_by_depth, draw_curves, save_grid, speedups
from draftsmith.eval.summary import summarize
from PIL import Image

from .rows import random_rows

PLACES = {
    place: {f"method {n}": summarize(random_rows(5, seed=n)) for n in range(methods)}
    for place, methods in (("pictures", 9), ("clips", 2), ("text", 1), ("4", 1), ("5", 1), ("6", 1), ("7", 1))
}  # fmt: skip
CURVES = [("finetune: loss", {"a": [(1, 3.0), (20, 2.0)], "b": [(1, 3.1), (20, 1.9)]}), ("tau", {"a": [(20, 2.0)]})]


@pytest.mark.parametrize("draw", [
    lambda path: acceptance_by_depth(path, PLACES),
    lambda path: acceptance_by_depth(path, {"text": PLACES["text"]}),
    lambda path: speedups(path, PLACES),
    lambda path: draw_curves(path, CURVES),
])  # fmt: skip
def test_a_figure_shows_something(draw, tmp_path):
    draw(tmp_path / "new" / "figure.png")
    with Image.open(tmp_path / "new" / "figure.png") as image:
        assert 300 <= image.width <= 1250 and 200 <= image.height <= 1400
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50


def test_a_grid_stands_row_by_row(tmp_path):
    pictures = torch.zeros(4, 3, 48, 48, dtype=torch.uint8)
    pictures[1] = 255
    path = tmp_path / "new" / "folder" / "grid.png"
    save_grid(path, pictures, columns=2)
    with Image.open(path) as image:
        assert image.size == (2 * 98 - 2, 2 * 98 - 2)
        assert image.getpixel((100, 3)) == (255, 255, 255) and image.getpixel((3, 100)) == (0, 0, 0)
