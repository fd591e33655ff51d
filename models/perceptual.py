"""A perceptual loss for image tokenizers: distances of EfficientNet-Lite0's states; LlamaGen has LPIPS over VGG16.

As LPIPS (Zhang et al. 2018, section 3) compares states: those of several depths, each place's channels scaled to unit
length, so that a depth with large states does not outweigh the others; squared distances are means over places. LPIPS
has weights for each channel that people's judgements taught it; there are none for Lite0, and all channels count alike.
Letters: B pictures, S side in pixels, C channels, h w places.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.fields import Place, Revision
from ..core.section import Section
from .folders import find_folder
from .hub import load_pretrained
from .lite0 import EfficientNetLite0Model

MEAN, STD = 0.498, 0.502  # of the pixels in [0, 1] that Lite0 was trained on


class PerceptualConfig(Section):
    """The network that reconstructions are compared by, beside pixel by pixel."""

    # Folder of EfficientNet-Lite0, as `draftsmith fetch lite0` writes it.
    path: Place
    # Of a Hub id.
    revision: Revision | None = None
    # Of the distance, beside the errors of pixels; LlamaGen weighs LPIPS as much as its squared error.
    weight: float = Field(1.0, gt=0)


class PerceptualLoss(nn.Module):
    """Frozen. Compares pictures [B,3,S,S] in [-1,1], which need not be clamped."""

    def __init__(self, tower: EfficientNetLite0Model, weight: float):
        super().__init__()
        self.tower, self.weight = tower.eval().requires_grad_(False), weight

    @classmethod
    def load(cls, config: PerceptualConfig) -> PerceptualLoss:
        """Raises `UserError` where the folder is missing, or of another model."""
        folder = find_folder(config.path, config.revision)
        return cls(load_pretrained(EfficientNetLite0Model.from_pretrained, folder, dtype=torch.float32), config.weight)

    def forward(self, images: Tensor, others: Tensor) -> Tensor:
        """The weighted mean over B, the depths and their places: a scalar, 0 for equal pictures, at most 4 x weight.
        Gradients reach `images` alone.
        """
        with torch.no_grad():
            wanted = self._maps(others)
        distances = [(a - b).square().sum(1).mean() for a, b in zip(self._maps(images), wanted, strict=True)]
        return self.weight * torch.stack(distances).mean()

    def _maps(self, images: Tensor) -> list[Tensor]:
        """[B,C,h,w] of each depth, of unit length over C."""
        pixels = (0.5 * images.float() + (0.5 - MEAN)) / STD
        return [F.normalize(states, dim=1) for states in self.tower.maps(pixels)]
