"""MSD: visual tokens are the projected image, straight into the layer."""

from __future__ import annotations

from typing import Literal

from .head_config import DirectHeadConfig


class MsdConfig(DirectHeadConfig):
    """An MSD head. Its rising share of images in training is the train stage's `visual_share: linear`."""

    kind: Literal["msd"]
    input_norm: bool | None = None
