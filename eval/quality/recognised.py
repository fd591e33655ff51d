"""Metrics of small generators on a CPU: EfficientNet-Lite0's features in place of Inception's, and names by neighbours.

Of 64 pixels nothing is left that Inception at 299 would tell apart, and its weights lie on no registry. A picture is
recognised where its nearest real picture, among those of many names, has the name that it was asked for.
Letters: B pictures, S side in pixels, M generated and N real pictures, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ...core.errors import UserError
from ...data.captioned.items import decode_image
from ...data.captioned.sources import CocoSource, read, usable
from ...models.hub import load_pretrained
from ...models.lite0 import EfficientNetLite0Model
from .extractors import Extractor, Picture, standardize

SIDE = 224
MEAN, STD = (0.498,) * 3, (0.502,) * 3


def lite0_features(path: Path, device: torch.device | str, *, pooled: bool) -> Extractor:
    """1280 features, the last layer's mean; or, unless `pooled`, the last map of stride 16 as 4 x 4 behind them, 3072.
    Raises `UserError`: the folder has other weights.
    """
    network = load_pretrained(EfficientNetLite0Model.from_pretrained, path, dtype=torch.float32).to(device).eval()
    count = network.config.head_channels if pooled else None

    def prepare(picture: Picture) -> Picture:
        return np.asarray(Image.fromarray(picture).resize((SIDE, SIDE), Image.Resampling.BICUBIC))

    def features(images: Tensor) -> Tensor:
        return network.features(standardize(images, MEAN, STD))[:, :count]

    return Extractor("EfficientNet-Lite0", prepare, features)


def captioned_pictures(annotations: str, side: int) -> tuple[list[Picture], list[str]]:
    """Pictures as a generator of `side` pixels learns them, and their captions, of a file in MS-COCO's layout with its
    pictures beside it. Raises `UserError`: none can be read.
    """
    source = CocoSource(kind="coco", annotations=annotations, images=str(Path(annotations).parent))
    items = [(decode_image(item, side), item.caption) for item in usable(read(source))]
    kept = [(np.asarray(image), caption) for image, caption in items if isinstance(image, Image.Image)]
    if not kept:
        raise UserError("no picture can be read", where=annotations, hint="its pictures lie beside it, by file_name")
    return [picture for picture, _ in kept], [caption for _, caption in kept]


def named(real: Tensor, captions: Sequence[str], generated: Tensor, wanted: Sequence[str]) -> tuple[Tensor, float]:
    """Which of the generated pictures have a real one of their own name as nearest, [M] float; and the share of real
    ones of which that is true: no generator should be expected to do better.

    What a caption says behind its comma is a manner ("a red apple, flat"). Where there are several, a picture is looked
    for among those of other manners: what is alike there is the thing, and a copy of a trained picture gains nothing.

    Args:
        real: [N,D]. Features are compared by their cosine, with mean and deviation of the real ones taken off.
        generated: [M,D].
    """
    mean, std = real.mean(0), real.std(0) + 1e-3
    normed = F.normalize((real - mean) / std, dim=-1)
    parts = [caption.partition(", ")[::2] for caption in captions]
    is_one = len({manner for _, manner in parts}) == 1

    def hits(features: Tensor, of: Sequence[str]) -> Tensor:
        result = []
        for scores, caption in zip(features @ normed.T, of, strict=True):
            name, _, manner = caption.partition(", ")
            seen = torch.tensor([is_one or other != manner for _, other in parts])
            result.append(parts[int(scores.masked_fill(~seen, -2.0).argmax())][0] == name)
        return torch.tensor(result).float()

    others = hits(normed, captions).mean()
    return hits(F.normalize((generated - mean) / std, dim=-1), wanted), float(others)
