"""InternVL 3 as a target: transformers' own class (InternVL3-8B-hf and its likes), our positions, masks and cache.

A picture is cut into tiles; where there are several, one of the whole picture follows (`data/families/`). The projector
reads 2 x 2 patches of a tile as one (pixel shuffle). Everything after it is LLaVA's.
Letters: I tiles, P patches, C channels, S side of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from ....core.batch import Request
from ....core.errors import UserError
from ...hub import config_value
from ...parts import TokenIds
from ..causal.section import check_windows
from ..family import Family, Pictures
from ..language import LanguageTarget
from ..llava.model import LlavaDecoder, LlavaTraining
from ..section import SeeingSection, check_half

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def see_tiles(model: PreTrainedModel, pixels: Tensor) -> Tensor:
    """[I,P/4,4C] of tiles [I,3,S,S]: states of the tower's chosen layer, merged, as the projector reads them."""
    config, core = model.config, model.model
    output = core.vision_tower(pixels.to(next(core.vision_tower.parameters()).dtype), output_hidden_states=True)
    layer = config.vision_feature_layer
    # The last layer's states are read after the tower's norm, where it has one.
    states = output.last_hidden_state if layer == -1 else output.hidden_states[layer]
    if config.vision_feature_select_strategy == "default":  # without the class token
        states = states[:, 1:]
    side = round(states.shape[1] ** 0.5)
    merged = core.pixel_shuffle(states.unflatten(1, (side, side)), scale_factor=config.downsample_ratio)
    return merged.flatten(1, 2)


class InternVLDecoder(LlavaDecoder):
    """An InternVL in eval mode."""

    def selected(self, pixels: Tensor) -> Tensor:
        return see_tiles(self.model, pixels)


class InternVLTraining(LlavaTraining):
    """The training forward over an InternVL: LLaVA's, over merged patches."""

    def selected_features(self, pixels: Tensor) -> Tensor:
        return see_tiles(self.model, pixels)


class InternVLTarget(LanguageTarget):
    """Pictures in tiles of the family's own, of which every merged patch is a token."""

    decoder_class = InternVLDecoder

    @classmethod
    def check_model(cls, model: Any) -> None:
        check_windows(model.config.get_text_config())

    def view(self, request: Request) -> Request:
        if any(not picture.is_plain for picture in request.pictures):
            raise UserError(
                "the target reads pictures in InternVL's tiles, and these are cut for another family",
                where=request.name, hint="use the processor of an InternVL for this target's requests",
            )  # fmt: skip
        return request


class InternVLPictures(Pictures):
    """Tiles, of which 2 x 2 patches become one token."""

    def unit(self, config: PreTrainedConfig) -> tuple[int, int]:
        vision = config.vision_config
        return round(vision.patch_size[0] / config.downsample_ratio), vision.image_size[0]


# model_type -> record.
FAMILIES = {
    "internvl": Family(
        "internvl", "InternVLForConditionalGeneration", InternVLTraining, InternVLTarget, InternVLPictures(),
        unread=("sglang",),
    ),
}  # fmt: skip


class InternVLTargetConfig(SeeingSection):
    """An InternVL target: published weights, or a tiny one that a recipe spells out and trains itself."""

    families: ClassVar[Mapping[str, Family]] = FAMILIES
    lookalikes: ClassVar[Mapping[str, str]] = {
        "internvl_chat": "name the repository of the same model that ends in -hf",
    }

    # InternVL 3 as transformers has it (repositories that end in -hf), with a language model of Qwen2, Qwen3 or Llama.
    # The original repositories (model_type internvl_chat) are code of their own, which is not run. An inline tower's
    # model_type is internvl_vision.
    kind: Literal["internvl"]

    def joined(self, text: PreTrainedConfig, vision: PreTrainedConfig, ids: TokenIds) -> PreTrainedConfig:
        from transformers import InternVLConfig

        check_half(vision, "internvl_vision")
        across = vision.image_size[0] // vision.patch_size[0]
        if across % 2 or vision.image_size[0] % vision.patch_size[0]:
            raise UserError(
                f"a tile of {vision.image_size[0]} pixels has {across} patches of {vision.patch_size[0]}, and 2 x 2 "
                "become one token",
                key="target.vision_tower.image_size", hint="write an even multiple of patch_size",
            )  # fmt: skip
        ids.put_into(text)
        return InternVLConfig(
            text_config=text.to_dict(),
            vision_config=vision.to_dict(),
            image_token_id=ids.image,
            image_seq_length=(across // 2) ** 2,
            tie_word_embeddings=bool(config_value(text, "tie_word_embeddings", False)),
        )
