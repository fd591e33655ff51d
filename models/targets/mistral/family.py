"""What the rest of draftsmith asks of Mistral 3 and Pixtral."""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from ....core.pictures import PatchGrid, Picture, whole_picture
from ..family import Family, Pictures
from .model import MISTRAL3, TOWER, MistralDecoder, MistralTraining, merge_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class MistralPictures(Pictures):
    """Pictures that the tower reads whole, one after another."""

    def fill(self, config: PreTrainedConfig, positions: int) -> tuple[list[Picture], tuple[int, ...]]:
        """One picture."""
        vision, merge = config.vision_config, merge_of(config)
        patch = vision.patch_size
        rows = min(isqrt(positions), vision.image_size // (patch * merge))
        grid = PatchGrid(1, rows * merge, rows * merge, merge)
        return [whole_picture(grid)], (grid.num_patches, 3 * patch**2)


_ENGINES = {"vllm": ("eagle", "eagle3")}
# model_type -> record. Pixtral's says llava: its tower makes it another family.
FAMILIES = {
    MISTRAL3: Family(
        MISTRAL3, "Mistral3ForConditionalGeneration", MistralTraining, MistralDecoder, MistralPictures(),
        engines=_ENGINES, unread=("sglang",),
    ),
    "llava": Family(
        "pixtral", "LlavaForConditionalGeneration", MistralTraining, MistralDecoder, MistralPictures(),
        tower=TOWER, engines=_ENGINES, unread=("sglang",),
    ),
}  # fmt: skip
