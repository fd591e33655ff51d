"""What the rest of draftsmith asks of Gemma 4, and of Gemma's language models."""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from ....core.pictures import PatchGrid, Picture, whole_picture
from ..family import Family, Pictures, Text
from .decoder import GemmaDecoder
from .model import GEMMA, SOFT_TOKENS
from .training import GemmaTraining

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class GemmaPictures(Pictures):
    """Pictures that the tower reads whole, one after another."""

    def fill(self, config: PreTrainedConfig, positions: int) -> tuple[list[Picture], tuple[int, ...]]:
        """One picture."""
        vision = config.vision_config
        pooled, rows = vision.pooling_kernel_size, isqrt(min(positions, SOFT_TOKENS))
        grid = PatchGrid(1, rows * pooled, rows * pooled, pooled)
        return [whole_picture(grid)], (grid.num_patches, 3 * vision.patch_size**2)


class GemmaFamily(Family):
    """Its towers of sounds are left out."""

    @property
    def model_class(self) -> type[PreTrainedModel]:
        from .soundless import Gemma4ForConditionalGeneration

        return Gemma4ForConditionalGeneration


_SCALED = Text(scales_embeddings=True)
# model_type -> record.
FAMILIES = {
    GEMMA: GemmaFamily(
        GEMMA, "Gemma4ForConditionalGeneration", GemmaTraining, GemmaDecoder, GemmaPictures(),
        texts=dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text"), _SCALED),
        unread=("vllm", "sglang"),
    ),
}  # fmt: skip
