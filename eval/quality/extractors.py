"""What turns pictures into numbers: an argument of every metric, so that synthetic datasets bring their own network.

A result always says whose features it stands on: a distance between features of one network means nothing beside
the same distance between another's. Letters: B images, S side in pixels, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .metric_pictures import Picture


@dataclass(frozen=True)
class Extractor:
    """A network that sees pictures, and for `clip` and `hpsv2` texts, too.

    Features for `fid` and `precision_recall`, logits of classes for `inception_score`, one score for `aesthetic`.
    """

    name: str  # stands in every result
    prepare: Callable[[Picture], Picture]  # uint8 [H,W,3] to uint8 [S,S,3], the same S for all
    features: Callable[[Tensor], Tensor]  # uint8 [B,3,S,S] in [0, 255] to [B,D] float on any device
    # B texts to [B,D] float, beside which an image's features of the same network may be laid.
    texts: Callable[[Sequence[str]], Tensor] | None = None


@torch.inference_mode()
def extract(
    extractor: Extractor, pictures: Sequence[Picture], *, batch_size: int, device: torch.device | str
) -> Tensor:
    """Features of all pictures, [n,D] float32 on the CPU. Pictures are read batch by batch."""
    parts = []
    for start in range(0, len(pictures), batch_size):
        stop = min(start + batch_size, len(pictures))
        prepared = [extractor.prepare(pictures[index]) for index in range(start, stop)]
        sizes = {picture.shape for picture in prepared}
        assert len(sizes) == 1, f"{extractor.name}: pictures prepared to different sizes {sorted(sizes)}"
        images = torch.from_numpy(np.stack(prepared)).permute(0, 3, 1, 2).to(device)
        parts.append(extractor.features(images).float().cpu())
    return torch.cat(parts)


@torch.inference_mode()
def embed(extractor: Extractor, texts: Sequence[str], *, batch_size: int) -> Tensor:
    """Embeddings of all texts, [n,D] float32 on the CPU."""
    assert extractor.texts is not None, f"{extractor.name} does not read texts"
    return torch.cat(
        [extractor.texts(texts[i : i + batch_size]).float().cpu() for i in range(0, len(texts), batch_size)]
    )


def standardize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 [B,3,H,W] to float32 with the mean and deviation of each channel in [0, 1] taken off."""
    shape = (1, 3, 1, 1)
    return (images.float() / 255 - images.new_tensor(mean, dtype=torch.float32).view(shape)) / images.new_tensor(
        std, dtype=torch.float32
    ).view(shape)
