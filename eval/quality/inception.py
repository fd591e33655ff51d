"""The Inception v3 of 2015 that FID and the inception score are defined with, from NVIDIA's TorchScript of it.

It is the very file that clean-fid loads; that package wants torchvision, and what it adds is one resize and the
statistics. TorchScript is deprecated since torch 2.11 and still loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .extractors import Extractor
from .pictures import clean_resize, crop_lanczos
from .weights import unfit

CROP = 256  # LANTERN's "FID at 256 pixels"
SIDE = 299


def load_inception(path: Path, device: torch.device | str) -> Any:
    """The network. Raises `UserError` where the file is no TorchScript of an Inception."""
    try:
        network = torch.jit.load(path, map_location=device).eval()
    except (RuntimeError, ValueError) as error:
        raise unfit(path, "inception", "cannot be read as TorchScript") from error
    if not hasattr(network, "layers"):
        raise unfit(path, "inception", "is the TorchScript of another network")
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
