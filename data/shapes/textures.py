"""Textured grounds of captioned pictures: noise and patterns for which many codes are equally good.

Published image generators are uncertain in grounds like these, and sure at the edges of objects (LANTERN, section 3,
"token selection ambiguity"; ADT-Tree, section III-B and figure 9).
Letters: S side of the picture in pixels.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from ...core.section import Section
from .scene import BACKGROUND

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
