"""The convolutional networks behind image metrics: Inception v3 of 2015, VGG16 and EfficientNet-Lite0.

FID and the inception score are defined with NVIDIA's TorchScript of Inception. It is the very file that clean-fid
loads; that package wants torchvision, and what it adds is one resize and the statistics. TorchScript is deprecated
since torch 2.11 and still loads. Precision and recall see VGG16's second hidden layer for ImageNet (Kynkaanniemi et al.
2019, section 3), before its ReLU as LANTERN takes it; parameters carry torchvision's names, so that its file loads as
it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ...core.finite import check_weights
from ...models.hub import load_pretrained
from .extractors import Extractor, Picture, clean_resize, crop_lanczos, squash_bilinear, standardize
from .metric_weights import load_state, read_state, unfit

CROP = 256  # LANTERN's "FID at 256 pixels"
SIDE = 299


def load_inception(path: Path, device: torch.device | str) -> object:
    """The network. Raises `UserError` where the file is no TorchScript of an Inception, or a weight is not finite."""
    try:
        network = torch.jit.load(path, map_location=device).eval()
    except (RuntimeError, ValueError) as error:
        raise unfit(path, "inception", "cannot be read as TorchScript") from error
    if not hasattr(network, "layers"):
        raise unfit(path, "inception", "is the TorchScript of another network")
    check_weights(network.state_dict(), path)
    return network


def fid_features(network: Any) -> Extractor:
    """2048 features of 256-pixel crops, resized to 299 as clean-fid does: LANTERN's FID."""

    def features(images: Tensor) -> Tensor:
        return network.layers((clean_resize(images, SIDE) - 128) / 128).flatten(1)

    return Extractor(
        f"Inception v3 of 2015, clean-fid resize of {CROP}-pixel crops", lambda p: crop_lanczos(p, CROP), features
    )


def class_logits(network: Any) -> Extractor:
    """Logits of the 1008 classes of 256-pixel crops, which the network resizes itself, without the last layer's bias.
    So did the score's first implementation; the papers here do not say what they took.
    """

    def logits(images: Tensor) -> Tensor:
        return network(images, no_output_bias=True).double().log()

    return Extractor(f"Inception v3 of 2015, {CROP}-pixel crops", lambda p: crop_lanczos(p, CROP), logits)


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
        # The dropout does nothing here and keeps the number of the layer after it.
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


def lite0_features(path: Path, device: torch.device | str, *, pooled: bool) -> Extractor:
    """What pictures of 64 pixels are measured by, on a CPU: Inception at 299 would tell nothing apart in them.

    1280 features, the last layer's mean; or, unless `pooled`, the last map of stride 16 as 4 x 4 behind them, 3072.

    Raises:
        UserError: the folder has other weights.
    """
    from ...models import lite0  # transformers takes long to import

    network = load_pretrained(lite0.EfficientNetLite0Model.from_pretrained, path, dtype=torch.float32).to(device).eval()
    side = network.config.image_size
    count = network.config.head_channels if pooled else None

    def prepare(picture: Picture) -> Picture:
        return np.asarray(Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC))

    def features(images: Tensor) -> Tensor:
        return network.features(standardize(images, (lite0.MEAN,) * 3, (lite0.STD,) * 3))[:, :count]

    return Extractor("EfficientNet-Lite0", prepare, features)
