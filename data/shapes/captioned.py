"""Captioned pictures of the synthetic dataset, written as LAION-COCO's shards are: tar files of png, txt and json.

One or two figures on a board of two by two, on paper with grain or before a texture, so that the pictures' empty parts
are as uncertain to a model as real backgrounds are. Figures of the held-out split never stand in another one: every
fifth combination of colour, shape and place is kept for it.

Textures are noise and patterns for which many codes are equally good: published image generators are uncertain in
grounds like these, and sure at the edges of objects (LANTERN, section 3, "token selection ambiguity"; ADT-Tree, section
III-B and figure 9). Letters: S side of the picture in pixels.
"""

from __future__ import annotations

import io
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw
from pydantic import Field

from ...core.errors import UserError
from ...core.files import new_folder
from ...core.json_types import JsonObject
from ...core.section import Section
from .scene import BACKGROUND, OVERSAMPLING, draw_shape
from .scene import COLORS as ALL_COLORS

Kind = Literal["grain", "speckle", "stripes", "checks", "gradient"]
KINDS: tuple[Kind, ...] = ("grain", "speckle", "stripes", "checks", "gradient")
GREY = 190  # mean of a texture: most of its noise is then neither white nor black
# A patterned ground is this share of pattern and the rest of noise, by variance.
PATTERN = 0.7
# Squares of one value along a side of the picture: at 32 pixels two pixels each, four to a code of 4 x 4 pixels.
SQUARES = 16


class Textures(Section):
    """Grounds with a texture, one kind a picture."""

    # Kinds to draw from: noise (grain, speckle), or patterns under noise (stripes, checks, gradient).
    kinds: list[Kind] = Field(list(KINDS), min_length=1)
    # Standard deviation of a texture in values of 0 to 255. The more, the more codes a tokenizer spends on it.
    contrast: float = Field(30.0, gt=0, le=128)
    # Share of pictures whose upper or lower half stays plain paper: sure and uncertain regions in one picture.
    half_plain: float = Field(0.5, ge=0, le=1)


def draw_ground(textures: Textures, size: int, rng: np.random.Generator) -> np.ndarray:
    """A ground without figures, uint8 [S,S,3]: a texture everywhere, or in the upper or lower half of plain paper."""
    kind = textures.kinds[rng.integers(len(textures.kinds))]
    grey = (GREY + textures.contrast * _field(kind, size, rng)).clip(0, 255)
    ground = np.repeat(grey[..., None], 3, axis=-1).astype(np.uint8)
    if rng.random() < textures.half_plain:
        half = slice(0, size // 2) if rng.random() < 0.5 else slice(size // 2, size)
        ground[half] = BACKGROUND
    return ground


def _field(kind: Kind, size: int, rng: np.random.Generator) -> np.ndarray:
    """[S,S] with mean about 0 and variance about 1."""
    if kind == "speckle":
        dots = rng.random((SQUARES, SQUARES)) < 0.3
        return _enlarged((0.3 - dots) / np.sqrt(0.3 * 0.7), size)
    noise = _enlarged(rng.normal(size=(SQUARES, SQUARES)), size)
    if kind == "grain":
        return noise
    return np.sqrt(PATTERN) * _pattern(kind, size, rng) + np.sqrt(1 - PATTERN) * noise


def _pattern(kind: Kind, size: int, rng: np.random.Generator) -> np.ndarray:
    """[S,S], periods and places drawn anew for each picture."""
    across, down = np.meshgrid(np.arange(size), np.arange(size))
    period = size / rng.choice([2, 3, 4])
    first, second = 2 * np.pi * rng.random(2)
    if kind == "checks":
        return np.sign(np.sin(2 * np.pi * across / period + first) * np.sin(2 * np.pi * down / period + second))
    angle = np.pi / 4 * rng.integers(8)
    along = across * np.cos(angle) + down * np.sin(angle)
    if kind == "stripes":
        return np.sign(np.sin(2 * np.pi * along / period + first))
    return (along - along.mean()) / along.std()


def _enlarged(squares: np.ndarray, size: int) -> np.ndarray:
    """[SQUARES,SQUARES] -> [S,S], each value a square of pixels."""
    places = np.arange(size) * SQUARES // size
    return squares[places][:, places]


# Of the scenes' names those that a tokenizer of a few dozen codes tells apart after minutes of training.
COLORS = {name: ALL_COLORS[name] for name in ("red", "green", "blue", "yellow", "purple", "black")}
SHAPES = ("circle", "square", "triangle", "cross")
HELD_OUT = "held_out"
PLACES = ("top left", "top right", "bottom left", "bottom right")


@dataclass(frozen=True)
class Figure:
    """A coloured shape in one quarter of a picture."""

    color: str
    shape: str
    place: str

    @property
    def caption(self) -> str:
        """The figure in words."""
        return f"a {self.color} {self.shape} at the {self.place}"

    @property
    def held_out(self) -> bool:
        """Whether the figure appears in the held-out split only: one combination in five."""
        return zlib.crc32(self.caption.encode()) % 5 == 0


def sample_figures(rng: random.Random, num_figures: int, *, held_out: bool) -> tuple[Figure, ...]:
    """Figures at different places, in reading order."""
    places = sorted(rng.sample(range(len(PLACES)), num_figures))
    figures = []
    for place in places:
        while True:
            figure = Figure(rng.choice(sorted(COLORS)), rng.choice(SHAPES), PLACES[place])
            if figure.held_out == held_out:
                break
        figures.append(figure)
    return tuple(figures)


def draw_figures(
    figures: tuple[Figure, ...],
    size: int,
    *,
    grain: float,
    rng: np.random.Generator,
    textures: Textures | None = None,
) -> Image.Image:
    """An RGB picture of `size` x `size`.

    Args:
        grain: noise over the whole picture, a standard deviation in [0, 255].
        textures: of the ground; None: plain paper.
    """
    side = size * OVERSAMPLING
    if textures is None:
        image = Image.new("RGB", (side, side), BACKGROUND)
    else:
        image = Image.fromarray(draw_ground(textures, size, rng)).resize((side, side), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(image)
    cell, margin = side / 2, side / 32
    for figure in figures:
        row, column = divmod(PLACES.index(figure.place), 2)
        x, y = column * cell + margin, row * cell + margin
        draw_shape(pen, figure.shape, x, y, cell - 2 * margin, COLORS[figure.color])
    small = np.asarray(image.resize((size, size), Image.Resampling.BICUBIC), dtype=np.float64)
    return Image.fromarray((small + rng.normal(0, grain, small.shape)).clip(0, 255).astype(np.uint8))


def caption_of(figures: tuple[Figure, ...]) -> str:
    """The caption of a picture with these figures."""
    return " and ".join(figure.caption for figure in figures)


def write_captioned(
    folder: Path,
    *,
    seed: int,
    image_size: int,
    grain: float,
    pairs: float,
    splits: dict[str, int],
    textures: Textures | None = None,
    before_each: Callable[[], None] = lambda: None,
) -> None:
    """Write `<split>-00000.tar` for each split under `folder`, aside and then renamed.

    Args:
        pairs: share of pictures with two figures.
        splits: split -> number of pictures; `held_out` has figures that no other split has.
        textures: of the grounds; None: plain paper.
        before_each: called before each picture; what it raises leaves nothing behind.
    """
    import webdataset  # brings packages that a recipe's sections have no use for

    # A stage that was killed before it was marked as done finds its own pictures here, and writes them again.
    with new_folder(folder, replace=True) as aside:
        for split, count in splits.items():
            # Fixed times and owners: the same seed writes the same bytes.
            with webdataset.TarWriter(str(aside / f"{split}-00000.tar"), mtime=0.0, user="", group="") as tar:
                for index in range(count):
                    before_each()
                    tar.write(_sample(seed, split, index, image_size, grain, pairs, textures))


def _sample(
    seed: int, split: str, index: int, image_size: int, grain: float, pairs: float, textures: Textures | None
) -> JsonObject:
    """A picture depends on (seed, split, index) alone."""
    name = f"{seed}/{split}/{index}"
    rng = random.Random(name)
    figures = sample_figures(rng, 2 if rng.random() < pairs else 1, held_out=split == HELD_OUT)
    grains = np.random.default_rng(zlib.crc32(name.encode()))
    buffer = io.BytesIO()
    draw_figures(figures, image_size, grain=grain, rng=grains, textures=textures).save(buffer, "PNG")
    truth = [{"color": f.color, "shape": f.shape, "place": f.place} for f in figures]
    return {
        "__key__": f"{split}-{index:06d}",
        "png": buffer.getvalue(),
        "txt": caption_of(figures),
        "json": {"figures": truth},
    }


_NAMES = sorted(COLORS)


def figures_of(caption: str) -> tuple[Figure, ...]:
    """The figures that a caption of this synthetic dataset names (the inverse of `caption_of`). Raises `UserError` for
    others.
    """
    parts = [part.split() for part in caption.split(" and ")]
    figures = tuple(Figure(words[1], words[2], " ".join(words[5:])) for words in parts if len(words) == 7)
    known = all(f.color in COLORS and f.shape in SHAPES and f.place in PLACES for f in figures)
    if not figures or not known or caption_of(figures) != caption or len({f.place for f in figures}) < len(figures):
        hint = "use captions of a synthetic dataset; a reader knows no other pictures"
        raise UserError(f"the caption {caption!r} names no figures of this dataset", hint=hint)
    return figures


def places_of(figures: tuple[Figure, ...]) -> list[list[int]]:
    """[4][2]: number of colour and of shape at each place in reading order, from 1; 0 where a place is empty."""
    table = [[0, 0] for _ in PLACES]
    for figure in figures:
        table[PLACES.index(figure.place)] = [_NAMES.index(figure.color) + 1, SHAPES.index(figure.shape) + 1]
    return table
