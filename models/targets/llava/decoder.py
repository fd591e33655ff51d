"""The cached forward over LLaVA: pictures in tiles, whose features can be pooled before the projector.

Letters: I tiles, P patches, C width of the tower, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....core.pictures import Picture
from ...decoding.decoder import CachedDecoder
from .made_for_engines import reading_of
from .model import pool_features, selected_features
from .packing import newline_of, pack

_TILES = 32  # that a tower reads at once


class LlavaDecoder(CachedDecoder):
    """A LLaVA in eval mode."""

    @property
    def reads_newlines(self) -> bool:
        """Whether it can read tiled pictures, whose rows end with a learned newline embedding."""
        return newline_of(self.core) is not None

    @property
    def reads_first(self) -> bool:
        """Whether the model reads a prompt's first token, as its config says."""
        return reading_of(self.model.config).first_token

    def selected(self, pixels: Tensor) -> Tensor:
        """The tower's states [I,P,C] that the projector reads of tiles [I,3,S,S]."""
        return selected_features(self.model, pixels)

    def see(self, pixels: Tensor, pictures: Sequence[Picture] = ()) -> Any:
        """The tower's states [I,P,C] that the projector reads: one pass serves every pooling."""
        # Tile by tile they are the same; a tower's layers of a long clip at once would be what fills the memory.
        return torch.cat([self.selected(tiles) for tiles in pixels.split(_TILES)])

    def _features(self, seen: Any, pictures: Sequence[Picture], pool: int) -> Tensor:
        return pack(self.core.multi_modal_projector(pool_features(seen, pool)), pictures, newline_of(self.core))
