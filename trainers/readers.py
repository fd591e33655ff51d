"""What reads drawn pictures: the network of the synthetic dataset, and what a caption says that it should read."""

from __future__ import annotations

from torch import Tensor, tensor

from ..data.shapes.captioned import COLORS, SHAPES, figures_of, places_of
from ..models.shapes_reader import ShapesReader as Reader

__all__ = ["Reader", "captioned", "new_reader"]


def new_reader() -> Reader:
    """An untrained network."""
    return Reader(len(COLORS), len(SHAPES))


def captioned(caption: str) -> Tensor:
    """[4,2] int64: colour and shape at each place, 0 where it is empty. Raises `UserError` for another dataset's."""
    return tensor(places_of(figures_of(caption)))
