"""Mistral 3 (Mistral Small 3.1 and 3.2, Ministral 3) and Pixtral as targets, of transformers' classes.

The tower reads a picture whole, in as many patches as it has; Mistral 3 merges 2 x 2 of them. Rows of a picture's
tokens end with tokens of text (`[IMG_BREAK]`, `[IMG_END]`), which have embeddings as other text has. Pixtral is a LLaVA
with this tower.
Letters: B rows, T tokens, P patches, C numbers of a patch, n visual tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from ....core.batch import Batch
from ....core.errors import UserError
from ....core.json_types import JsonObject
from ....core.pictures import PatchGrid
from ...hub import config_value
from ...packed_row import last_states
from ...parts import TokenIds
from ..causal.section import check_windows
from ..family import Family, tower_type
from ..llava.model import LlavaTraining
from ..native_pictures import NativeSizeDecoder, NativeSizePictures, NativeSizeTarget, NativeSizeTraining, merge_of
from ..section import SeeingSection, check_half

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MISTRAL3, TOWER = "mistral3", "pixtral"  # model types of the whole and of the tower


class MistralDecoder(NativeSizeDecoder):
    """A Mistral 3 or a Pixtral in eval mode."""

    @staticmethod
    def see_picture(model: Any, patches: Tensor, grid: PatchGrid) -> Tensor:
        config, core, side = model.config, model.model, int(model.config.vision_config.patch_size)
        image = patches.view(grid.rows, grid.columns, 3, side, side).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
        sizes = [(grid.rows * side, grid.columns * side)]
        output = core.vision_tower(image[None], image_sizes=sizes, output_hidden_states=True)
        states = output.hidden_states[config.vision_feature_layer][0]  # [P,C]
        return core.multi_modal_projector(states, *((sizes,) if config.model_type == MISTRAL3 else ()))


class MistralTraining(NativeSizeTraining):
    """The training forward over a Mistral 3 or a Pixtral."""

    decoder_class = MistralDecoder
    parts_of = staticmethod(LlavaTraining.parts_of)

    def hidden_states(self, batch: Batch) -> Tensor:
        embeds, _ = self._embeds(batch)
        return last_states(self.model.model.language_model, batch, embeds, batch.positions[0])


class MistralTarget(NativeSizeTarget):
    """Pictures that the tower reads whole, in rows that end with tokens of text."""

    decoder_class = MistralDecoder

    @classmethod
    def check_model(cls, model: Any) -> None:
        config = model.config
        if tower_type(config) != TOWER:
            raise UserError(f"the weights have a tower of model_type {config.vision_config.model_type}, no Pixtral's",
                            key="target.kind", hint=f"write kind: {config.model_type}")  # fmt: skip
        if not isinstance(config.vision_feature_layer, int):
            raise UserError(f"the projector reads several of the tower's layers ({config.vision_feature_layer}), and "
                            "one is read here", key="target.path", hint="use the published weights")  # fmt: skip
        check_windows(config.get_text_config())


class MistralPictures(NativeSizePictures):
    """A picture of at most the tower's size."""

    def most_rows(self, config: PreTrainedConfig) -> int:
        return config.vision_config.image_size // (config.vision_config.patch_size * merge_of(config))


_ENGINES = {"vllm": ("eagle", "eagle3")}
# model_type -> record. Pixtral's says llava: its tower makes it another family.
FAMILIES = {
    MISTRAL3: Family(
        MISTRAL3, "Mistral3ForConditionalGeneration", MistralTraining, MistralTarget, MistralPictures(),
        engines=_ENGINES, unread=("sglang",),
    ),
    "llava": Family(
        "pixtral", "LlavaForConditionalGeneration", MistralTraining, MistralTarget, MistralPictures(),
        tower=TOWER, engines=_ENGINES, unread=("sglang",),
    ),
}  # fmt: skip


class MistralTargetConfig(SeeingSection):
    """A Mistral 3 or Pixtral target: published weights, or a tiny one that a recipe spells out and trains itself."""

    families: ClassVar[Mapping[str, Family]] = FAMILIES

    # Mistral 3, whose tower's patches are merged 2 x 2, or Pixtral, a LLaVA with the same tower (weights of
    # transformers' layout, as mistral-community/pixtral-12b). An inline tower's model_type is pixtral.
    kind: Literal["mistral3", "pixtral"]

    def joined(self, text: PreTrainedConfig, vision: PreTrainedConfig, ids: TokenIds) -> PreTrainedConfig:
        from transformers import LlavaConfig, Mistral3Config

        check_half(vision, TOWER)
        ids.put_into(text)
        joined: JsonObject = {
            "text_config": text.to_dict(), "vision_config": vision.to_dict(), "image_token_index": ids.image,
            "vision_feature_layer": -1, "tie_word_embeddings": bool(config_value(text, "tie_word_embeddings", False)),
        }  # fmt: skip
        if self.base_kind == MISTRAL3:
            return Mistral3Config(**joined)
        return LlavaConfig(**joined, vision_feature_select_strategy="full", image_seq_length=1)
