"""Scenes: a few objects on a three-by-three board, drawn with Pillow.

The demo's target must learn whose colour is whose, so colours and shapes are drawn uniformly and
independently: without the picture no answer can be guessed better than one in `len(COLORS)`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 210, 50),
    "purple": (150, 60, 180),
    "orange": (240, 140, 30),
    "black": (25, 25, 25),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "star")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")
BACKGROUND = (176, 176, 176)


@dataclass(frozen=True)
class Object:
    shape: str
    color: str
    row: int
    column: int

    @property
    def place(self) -> str:
        return f"{ROWS[self.row]} {COLUMNS[self.column]}"

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """Objects with distinct shapes and distinct places; `word` is written across the board where given."""

    objects: tuple[Object, ...]
    word: str | None = None


def sample_scene(rng: random.Random, num_objects: int) -> Scene:
    """`num_objects` (1 to 6) objects in reading order, colours independent of shapes and places."""
    shapes = rng.sample(SHAPES, num_objects)
    cells = sorted(rng.sample(range(9), num_objects))
    objects = [
        Object(shape, rng.choice(sorted(COLORS)), *divmod(cell, 3)) for shape, cell in zip(shapes, cells, strict=True)
    ]
    return Scene(tuple(objects))


def draw(scene: Scene, size: int) -> Image.Image:
    """The scene as an RGB image of `size` x `size` pixels (a multiple of 3 keeps cells whole)."""
    from .font import draw_word

    image = Image.new("RGB", (size, size), BACKGROUND)
    pen = ImageDraw.Draw(image)
    if scene.word is not None:
        draw_word(image, scene.word)
    cell = size / 3
    for item in scene.objects:
        margin = cell * 0.08
        left, top = item.column * cell + margin, item.row * cell + margin
        _draw_shape(pen, item.shape, left, top, cell - 2 * margin - 1, COLORS[item.color])
    return image


def _draw_shape(pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, side: float, fill: tuple[int, int, int]) -> None:
    def points(*fractions: tuple[float, float]) -> list[tuple[float, float]]:
        return [(x + fx * side, y + fy * side) for fx, fy in fractions]

    if shape == "circle":
        pen.ellipse((x, y, x + side, y + side), fill=fill)
    elif shape == "square":
        pen.rectangle((x, y, x + side, y + side), fill=fill)
    elif shape == "triangle":
        pen.polygon(points((0.5, 0), (1, 1), (0, 1)), fill=fill)
    elif shape == "diamond":
        pen.polygon(points((0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)), fill=fill)
    elif shape == "cross":
        pen.rectangle((x + side * 0.36, y, x + side * 0.64, y + side), fill=fill)
        pen.rectangle((x, y + side * 0.36, x + side, y + side * 0.64), fill=fill)
    else:
        outer_inner = [(0.5, 0), (0.62, 0.36), (1, 0.38), (0.7, 0.6), (0.82, 1), (0.5, 0.76), (0.18, 1), (0.3, 0.6),
                       (0, 0.38), (0.38, 0.36)]  # fmt: skip
        pen.polygon(points(*outer_inner), fill=fill)
