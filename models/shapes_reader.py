"""Reads drawn figures: a small network that names colour and shape at each of the four places of a captioned picture.

It is trained on real pictures of the synthetic dataset and scores generated ones; its hidden features stand where
Inception's do. Letters: B pictures, S side in pixels, P = 4 places, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.batch import PictureBatch, StepLoss
from ..core.files import read_json
from ..core.pretrained import RESTORE
from ..core.states import TargetStates
from .folders import CONFIG, read_weights, shapes_of, write_folder


@dataclass(frozen=True)
class _Settings:
    num_colors: int
    num_shapes: int
    width: int


class ShapesReader(nn.Module):
    """Convolutions over each quarter of the picture; class 0 is an empty place.

    Args:
        num_colors, num_shapes: without the empty place.
    """

    def __init__(self, num_colors: int, num_shapes: int, width: int = 32):
        super().__init__()
        self.settings = {"num_colors": num_colors, "num_shapes": num_shapes, "width": width}
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
            nn.Linear(18 * width, 2 * width), nn.ReLU(),
        )  # fmt: skip
        self.color = nn.Linear(2 * width, num_colors + 1)
        self.shape = nn.Linear(2 * width, num_shapes + 1)

    def parts(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Trainable parameters by part, for the optimizer's groups."""
        return {"reader": [*self.named_parameters()]}

    def features(self, pixels: Tensor) -> Tensor:
        """uint8 [B,3,S,S] -> [B,P,D], places in reading order."""
        images = pixels.float() / 127.5 - 1.0
        half = images.shape[-1] // 2
        quarters = images.unfold(2, half, half).unfold(3, half, half)  # [B,3,2,2,h,h]
        flat = quarters.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        return self.body(flat).unflatten(0, (len(pixels), 4))

    def read(self, pixels: Tensor) -> Tensor:
        """[B,P,2] int64: colour and shape at each place, 0 where it is empty."""
        states = self.features(pixels)
        return torch.stack([self.color(states).argmax(-1), self.shape(states).argmax(-1)], dim=-1)

    def forward(self, batch: PictureBatch, states: TargetStates | None = None) -> StepLoss:
        """Cross-entropy of both names at all places; `labels` [B,P*2]."""
        features = self.features(batch.pixels)
        truth = batch.labels.unflatten(-1, (4, 2))
        color, shape = self.color(features), self.shape(features)
        losses = F.cross_entropy(color.flatten(0, 1), truth[..., 0].flatten(), reduction="none")
        losses = losses + F.cross_entropy(shape.flatten(0, 1), truth[..., 1].flatten(), reduction="none")
        right = (color.argmax(-1) == truth[..., 0]).all(-1) & (shape.argmax(-1) == truth[..., 1]).all(-1)
        real = batch.real
        loss = (losses.unflatten(0, (-1, 4)).sum(-1) * real).sum()
        return StepLoss(loss, real.sum(), {"accuracy": (right & real).sum()})

    def save(self, folder: Path) -> None:
        """Write weights and settings to `folder`."""
        write_folder(folder, {"model_type": "shapes_reader", **self.settings}, self.state_dict())

    @classmethod
    def load(cls, folder: Path) -> ShapesReader:
        """The reader that `save` wrote, in eval mode. Raises `UserError` where its files are damaged."""
        reader = cls(**vars(read_json(folder / CONFIG, _Settings, hint=RESTORE)))
        reader.load_state_dict(read_weights(folder, shapes_of(reader.state_dict()), None))
        return reader.eval()
