"""Gemma 4 as a target: dense, with pictures; our positions, masks and cache over transformers' own class."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from ....core.batch import Request
from ....core.errors import Refused
from ....core.pictures import PatchGrid, Picture, whole_picture
from ...inline import InlineModel, UnevenModel, inline_config
from ...parts import TokenIds
from ..family import Family, Pictures, Text
from ..language import LanguageTarget
from ..section import TargetSection
from ..whole_pictures import check_whole
from .decoder import GemmaDecoder
from .model import GEMMA, SOFT_TOKENS, check_text, gemma_config
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


class GemmaTargetConfig(TargetSection):
    """A Gemma 4 target: published weights, or a tiny one that a recipe spells out and trains itself."""

    families: ClassVar[Mapping[str, Family]] = FAMILIES
    lookalikes: ClassVar[Mapping[str, str]] = {
        "gemma4_unified": "it has no tower (12B): patches enter the language model as they are, which is not read "
        "here; use E2B, E4B or 31B",
    }

    # The dense sizes with a tower: E2B, E4B, 31B. The tower of sounds of the two smaller ones is not read.
    kind: Literal["gemma4"]
    # Inline configs of a target that a `train` stage with `model: target` makes from scratch; their model types are
    # gemma4_text and gemma4_vision.
    language_model: UnevenModel | None = None
    vision_tower: InlineModel | None = None

    @model_validator(mode="after")
    def _one_source(self) -> GemmaTargetConfig:
        self.check_one_source(self.language_model, self.vision_tower)
        if self.tensor_parallel_size > 1:
            problem = "layers of a Gemma 4 differ in their heads, and some read another's keys; it was never cut here"
            raise Refused("tensor_parallel_size", problem, "leave it out: device_map: auto spreads the target")
        return self

    def inline_config(self, ids: TokenIds) -> PreTrainedConfig:
        assert self.language_model is not None and self.vision_tower is not None
        vision = inline_config(self.vision_tower, "target.vision_tower")
        text = inline_config(self.language_model, "target.language_model", uneven=True)
        return gemma_config(text, vision, ids)

    def target(self, model: PreTrainedModel, *, num_token_ids: int, image_token_id: int | None) -> GemmaTarget:
        return GemmaTarget(model, num_token_ids=num_token_ids, prefill_chunk=self.prefill_chunk)


class GemmaTarget(LanguageTarget):
    """Pictures that the tower reads whole, in one run of tokens each.

    Args:
        num_token_ids: ids from here on have no token.
        prefill_chunk: places of a prompt that are run at once; None: all. A picture whose tokens see each other is
            run whole all the same.

    Raises:
        UserError: the model is a mixture of experts, or attends in both directions everywhere.
    """

    def __init__(self, model: PreTrainedModel, *, num_token_ids: int, prefill_chunk: int | None = None):
        config: PreTrainedConfig = model.config
        check_text(config.get_text_config())
        self.merge: int = config.vision_config.pooling_kernel_size
        super().__init__(GemmaDecoder(model, num_token_ids=num_token_ids), prefill_chunk=prefill_chunk)

    def view(self, request: Request) -> Request:
        """The request as the target reads it. Raises `UserError` where its pictures are cut for another family."""
        return check_whole(request, self.merge)
