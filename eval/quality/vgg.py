"""VGG16 as precision and recall see it: ImageNet's second hidden layer (Kynkaanniemi et al. 2019, section 3).

Parameters carry torchvision's names, so that its file loads as it is; torchvision itself is not needed for thirteen
convolutions. LANTERN takes the layer before its ReLU, and so do we.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from .extractors import Extractor, standardize
from .pictures import squash_bilinear
from .weights import load_state, read_state

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
DEPTHS = (2, 2, 3, 3, 3)


class Vgg16(nn.Module):
    """Five blocks of convolutions and two linear layers; the defaults are the published network."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512, 512), hidden: int = 4096, side: int = 224) -> None:
        super().__init__()
        self.side = side
        layers: list[nn.Module] = []
        channels = 3
        for width, depth in zip(widths, DEPTHS, strict=True):
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        flat = channels * (side // 2 ** len(widths)) ** 2
        # The dropout does nothing here and keeps the number of the layer behind it.
        self.classifier = nn.Sequential(nn.Linear(flat, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, hidden))

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [B,3,side,side] to [B,hidden], before the ReLU."""
        return self.classifier(self.features(standardize(images, MEAN, STD)).flatten(1))


def vgg_features(path: Path, device: torch.device | str, network: Vgg16 | None = None) -> Extractor:
    """Args: network: of another width than the published one. Raises `UserError` where the file does not fit."""
    network = network or Vgg16()
    # The last layer names the classes and is not needed.
    state = {n: value for n, value in read_state(path, "vgg16").items() if not n.startswith("classifier.6.")}
    load_state(network, state, path, "vgg16")
    network = network.eval().to(device)
    side = network.side
    return Extractor("VGG16 second hidden layer", lambda p: squash_bilinear(p, side), network)
