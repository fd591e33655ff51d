"""Scenes: a few objects on a three-by-three board, drawn with Pillow.

The demo's target must learn whose colour is whose, so colours and shapes are drawn uniformly and
independently: without the picture no answer can be guessed better than one in `len(COLORS)`.

Answers have one wording each, or any of several right ones: written with one, they can be learned word for word, and a
draft learns nothing from a target's answers that the data does not say.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw

# Every colour is darker than the page, so that a shape is a linear function of the pixels for any colour.
# With colours on both sides of a gray page, and CLIP's normalization, a tiny tower learned the colours and then
# no shape for 3000 steps; like this it learns both in 200 (docs/decisions/0025).
COLORS = {
    "red": (220, 30, 30),
    "green": (20, 150, 50),
    "blue": (40, 70, 220),
    "yellow": (240, 200, 20),
    "purple": (140, 50, 170),
    "orange": (245, 130, 20),
    "pink": (245, 120, 180),
    "black": (40, 40, 40),
}
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "star")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")
BACKGROUND = (255, 255, 255)
# Image statistics of the synthetic dataset, as a data set's own: an empty place is exactly zero.
IMAGE_MEAN = (1.0, 1.0, 1.0)
IMAGE_STD = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Object:
    """A coloured shape in one cell of the board."""

    shape: str
    color: str
    row: int
    column: int

    @property
    def place(self) -> str:
        """The cell in words: "top left"."""
        return f"{ROWS[self.row]} {COLUMNS[self.column]}"

    @property
    def name(self) -> str:
        """Colour and shape: "red circle"."""
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
    """The scene as an RGB image of `size` x `size` pixels, smooth at the edges (a multiple of 3 keeps cells whole)."""
    image = Image.new("RGB", (size * OVERSAMPLING, size * OVERSAMPLING), BACKGROUND)
    pen = ImageDraw.Draw(image)
    if scene.word is not None:
        draw_word(image, scene.word)
    cell = image.width / 3
    for item in scene.objects:
        margin = cell * 0.05
        left, top = item.column * cell + margin, item.row * cell + margin
        draw_shape(pen, item.shape, left, top, cell - 2 * margin - 1, COLORS[item.color])
    return image.resize((size, size), Image.Resampling.BICUBIC)


# Five rows of three bits for each letter, most significant bit left.
GLYPHS = {
    "a": (2, 5, 7, 5, 5), "b": (6, 5, 6, 5, 6), "c": (3, 4, 4, 4, 3), "d": (6, 5, 5, 5, 6), "e": (7, 4, 6, 4, 7),
    "f": (7, 4, 6, 4, 4), "g": (3, 4, 5, 5, 3), "h": (5, 5, 7, 5, 5), "i": (7, 2, 2, 2, 7), "k": (5, 5, 6, 5, 5),
    "l": (4, 4, 4, 4, 7), "m": (5, 7, 7, 5, 5), "n": (6, 5, 5, 5, 5), "o": (2, 5, 5, 5, 2), "p": (6, 5, 6, 4, 4),
    "r": (6, 5, 6, 5, 5), "s": (3, 4, 2, 1, 6), "t": (7, 2, 2, 2, 2), "u": (5, 5, 5, 5, 7), "w": (5, 5, 7, 7, 5),
}  # fmt: skip


def draw_word(image: Image.Image, word: str) -> None:
    """Write `word` (up to four known letters) in black across the middle of a square image, in place."""
    scale = image.width // (4 * len(word) + 1)
    left = (image.width - (4 * len(word) - 1) * scale) // 2
    top = (image.height - 5 * scale) // 2
    for place, letter in enumerate(word):
        for row, bits in enumerate(GLYPHS[letter]):
            for column in range(3):
                if bits >> (2 - column) & 1:
                    x, y = left + (4 * place + column) * scale, top + row * scale
                    image.paste((0, 0, 0), (x, y, x + scale, y + scale))


OVERSAMPLING = 4
# Corners as fractions of the cell.
_CORNERS = {
    "square": ((0.08, 0.08), (0.92, 0.08), (0.92, 0.92), (0.08, 0.92)),
    "triangle": ((0.5, 0), (1, 1), (0, 1)),
    "diamond": ((0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)),
    "cross": ((0.33, 0), (0.67, 0), (0.67, 0.33), (1, 0.33), (1, 0.67), (0.67, 0.67),
              (0.67, 1), (0.33, 1), (0.33, 0.67), (0, 0.67), (0, 0.33), (0.33, 0.33)),
    "star": ((0.5, 0), (0.65, 0.34), (1, 0.38), (0.75, 0.62), (0.83, 1),
             (0.5, 0.8), (0.17, 1), (0.25, 0.62), (0, 0.38), (0.35, 0.34)),
}  # fmt: skip


def draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, side: float, fill: tuple[int, int, int]
) -> None:
    """Draw one shape into the square of `side` pixels at (x, y), in place."""
    if shape == "circle":
        pen.ellipse((x, y, x + side, y + side), fill=fill)
    else:
        pen.polygon([(x + across * side, y + down * side) for across, down in _CORNERS[shape]], fill=fill)


# Wordings of one meaning, the usual one first -> one of them.
Say = Callable[..., str]
Wordings = Literal["usual", "several"]


def usual(*wordings: str) -> str:
    """The first: every answer of a kind is then written alike."""
    return wordings[0]


def drawn_by(rng: random.Random) -> Say:
    """Any of them, each as likely as the others."""
    return lambda *wordings: rng.choice(wordings)
