"""InternVL 3 as a target: transformers' own class (InternVL3-8B-hf and its likes), our positions, masks and cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from ....core.batch import Request
from ....core.errors import UserError
from ...hub import read_config
from ...inline import InlineModel
from ...parts import TokenIds
from ..causal.section import check_windows
from ..family import Family, Pictures
from ..language import LanguageTarget
from ..section import TargetSection
from .model import INTERNVL, InternVLDecoder, InternVLTraining, internvl_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


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


class InternVLTargetConfig(TargetSection):
    """An InternVL target: published weights, or a tiny one that a recipe spells out and trains itself."""

    families: ClassVar[Mapping[str, Family]] = FAMILIES
    lookalikes: ClassVar[Mapping[str, str]] = {
        "internvl_chat": "name the repository of the same model that ends in -hf",
    }

    # InternVL 3 as transformers has it (repositories that end in -hf), with a language model of Qwen2, Qwen3 or Llama.
    # The original repositories (model_type internvl_chat) are code of their own, which is not run.
    kind: Literal["internvl"]
    # Inline configs of a target that a `train` stage with `model: target` makes from scratch; the tower's model_type is
    # internvl_vision.
    language_model: InlineModel | None = None
    vision_tower: InlineModel | None = None

    @model_validator(mode="after")
    def _one_source(self) -> InternVLTargetConfig:
        self.check_one_source(self.language_model, self.vision_tower)
        return self

    def inline_config(self, ids: TokenIds) -> PreTrainedConfig:
        assert self.language_model is not None and self.vision_tower is not None
        vision = read_config(self.vision_tower, key="target.vision_tower")
        return internvl_config(read_config(self.language_model, key="target.language_model"), vision, ids)

    def target(self, model: PreTrainedModel, *, num_token_ids: int, image_token_id: int | None) -> InternVLTarget:
        return InternVLTarget(model, num_token_ids=num_token_ids, prefill_chunk=self.prefill_chunk)


class InternVLTarget(LanguageTarget):
    """Pictures in tiles of the family's own, of which every merged patch is a token.

    Args:
        num_token_ids: ids from here on have no token.
        prefill_chunk: places of a prompt that are run at once; None: all.

    Raises:
        UserError: some layers of the language model see a window alone.
    """

    def __init__(self, model: PreTrainedModel, *, num_token_ids: int, prefill_chunk: int | None = None):
        check_windows(model.config.get_text_config())
        super().__init__(InternVLDecoder(model, num_token_ids=num_token_ids), prefill_chunk=prefill_chunk)

    def view(self, request: Request) -> Request:
        """The request as the target reads it. Raises `UserError` where its pictures are cut for another family."""
        if any(not picture.is_plain for picture in request.pictures):
            raise UserError(
                "the target reads pictures in InternVL's tiles, and these are cut for another family",
                where=request.name, hint="use the processor of an InternVL for this target's requests",
            )  # fmt: skip
        return request
