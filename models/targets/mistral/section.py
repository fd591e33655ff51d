"""Mistral 3 (Mistral Small 3.1 and 3.2, Ministral 3) and Pixtral as targets."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import TYPE_CHECKING, ClassVar

from pydantic import model_validator

from ....core.batch import Request
from ....core.errors import UserError
from ....core.pictures import PatchGrid, Picture, whole_picture
from ...hub import read_config
from ...inline import InlineModel
from ...parts import TokenIds
from ..causal.section import check_windows
from ..family import Family, Pictures, tower_type
from ..language import LanguageTarget
from ..section import TargetSection
from ..whole_pictures import check_whole
from .model import MISTRAL3, TOWER, MistralDecoder, MistralKind, MistralTraining, merge_of, mistral_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


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


class MistralTargetConfig(TargetSection):
    """A Mistral 3 or Pixtral target: published weights, or a tiny one that a recipe spells out and trains itself."""

    families: ClassVar[Mapping[str, Family]] = FAMILIES

    # Mistral 3, whose tower's patches are merged 2 x 2, or Pixtral, a LLaVA with the same tower (weights of
    # transformers' layout, as mistral-community/pixtral-12b).
    kind: MistralKind
    # Inline configs of a target that a `train` stage with `model: target` makes from scratch; the tower's model_type is
    # pixtral.
    language_model: InlineModel | None = None
    vision_tower: InlineModel | None = None

    @model_validator(mode="after")
    def _one_source(self) -> MistralTargetConfig:
        self.check_one_source(self.language_model, self.vision_tower)
        return self

    def inline_config(self, ids: TokenIds) -> PreTrainedConfig:
        assert self.language_model is not None and self.vision_tower is not None
        vision = read_config(self.vision_tower, key="target.vision_tower")
        return mistral_config(
            self.base_kind, read_config(self.language_model, key="target.language_model"), vision, ids
        )

    def target(self, model: PreTrainedModel, *, num_token_ids: int, image_token_id: int | None) -> MistralTarget:
        return MistralTarget(model, num_token_ids=num_token_ids, prefill_chunk=self.prefill_chunk)


class MistralTarget(LanguageTarget):
    """Pictures that the tower reads whole, in rows that end with tokens of text.

    Args:
        num_token_ids: ids from here on have no token.
        prefill_chunk: places of a prompt that are run at once; None: all.

    Raises:
        UserError: the tower is no Pixtral's, several of its layers are read, or some layers of the language model see a
            window alone.
    """

    def __init__(self, model: PreTrainedModel, *, num_token_ids: int, prefill_chunk: int | None = None):
        config: PreTrainedConfig = model.config
        if tower_type(config) != TOWER:
            raise UserError(f"the weights have a tower of model_type {config.vision_config.model_type}, no Pixtral's",
                            key="target.kind", hint=f"write kind: {config.model_type}")  # fmt: skip
        if not isinstance(config.vision_feature_layer, int):
            raise UserError(f"the projector reads several of the tower's layers ({config.vision_feature_layer}), and "
                            "one is read here", key="target.path", hint="use the published weights")  # fmt: skip
        check_windows(config.get_text_config())
        self.merge = merge_of(config)
        super().__init__(MistralDecoder(model, num_token_ids=num_token_ids), prefill_chunk=prefill_chunk)

    def view(self, request: Request) -> Request:
        """The request as the target reads it. Raises `UserError` where its pictures are cut for another family."""
        return check_whole(request, self.merge)
