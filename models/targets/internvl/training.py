"""The training forward over an InternVL. Letters: I tiles, P patches, C width of the tower."""

from __future__ import annotations

from torch import Tensor

from ..llava.training import LlavaTraining
from .model import see_tiles


class InternVLTraining(LlavaTraining):
    """The training forward over an InternVL: LLaVA's, over merged patches."""

    def selected_features(self, pixels: Tensor) -> Tensor:
        """The tower's merged states that the projector reads, [I,P/4,4C]."""
        return see_tiles(self.model, pixels)
