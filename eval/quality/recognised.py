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


def lite0_features(path: Path, device: torch.device | str) -> Extractor:
    """3072 features: the last layer's mean, and the last map of stride 16 as 4 x 4. Raises `UserError`."""
    network = load_pretrained(EfficientNetLite0Model.from_pretrained, path, dtype=torch.float32).to(device).eval()

    def prepare(picture: Picture) -> Picture:
        return np.asarray(Image.fromarray(picture).resize((SIDE, SIDE), Image.Resampling.BICUBIC))

    def features(images: Tensor) -> Tensor:
        return network.features(standardize(images, MEAN, STD))

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


def name_of(caption: str) -> str:
    """The thing that a caption asks for: "a red apple" of "a red apple, flat"."""
    return caption.split(",")[0].strip()


def named(real: Tensor, names: Sequence[str], generated: Tensor, wanted: Sequence[str]) -> tuple[Tensor, float]:
    """Which of the generated pictures have a real one of their own name as nearest, [M] float; and the share of real
    ones of which that is true among the others: no generator should be expected to do better.

    Args:
        real: [N,D]. Features are compared by their cosine, with mean and deviation of the real ones taken off.
        generated: [M,D].
    """
    mean, std = real.mean(0), real.std(0) + 1e-3
    normed = F.normalize((real - mean) / std, dim=-1)
    alike = F.normalize((generated - mean) / std, dim=-1) @ normed.T
    among = (normed @ normed.T).fill_diagonal_(-2.0)

    def hits(scores: Tensor, of: Sequence[str]) -> Tensor:
        return torch.tensor([float(names[at] == name) for at, name in zip(scores.argmax(-1).tolist(), of, strict=True)])

    return hits(alike, wanted), float(hits(among, names).mean())
