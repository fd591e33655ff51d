"""The cached forward over InternVL: its tower's patches are merged, everything else is LLaVA's."""

from __future__ import annotations

from torch import Tensor

from ..llava.decoder import LlavaDecoder
from .model import see_tiles


class InternVLDecoder(LlavaDecoder):
    """An InternVL in eval mode."""

    def selected(self, pixels: Tensor) -> Tensor:
        """The tower's merged states [I,P/4,4C] that the projector reads of tiles [I,3,S,S]."""
        return see_tiles(self.model, pixels)
