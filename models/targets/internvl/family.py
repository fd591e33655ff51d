"""What the rest of draftsmith asks of InternVL 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..family import Family, Pictures
from .model import INTERNVL, InternVLDecoder, InternVLTraining

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class InternVLPictures(Pictures):
    """Tiles, of which 2 x 2 patches become one token."""

    def unit(self, config: PreTrainedConfig) -> tuple[int, int]:
        vision = config.vision_config
        return round(vision.patch_size[0] / config.downsample_ratio), vision.image_size[0]


# model_type -> record.
FAMILIES = {
    INTERNVL: Family(
        INTERNVL, "InternVLForConditionalGeneration", InternVLTraining, InternVLDecoder, InternVLPictures(),
        unread=("sglang",),
    ),
}  # fmt: skip
