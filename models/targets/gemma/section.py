"""Gemma 4 as a target: dense, with pictures; our positions, masks and cache over transformers' own class."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from ....core.errors import Refused
from ...hub import config_value
from ...inline import UnevenModel
from ...parts import TokenIds
from ..family import Family, Text
from ..native_pictures import NativeSizePictures, NativeSizeTarget
from ..section import SeeingSection, check_half
from .decoder import GemmaDecoder, GemmaTraining
from .model import check_text, soundless

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class GemmaTarget(NativeSizeTarget):
    """Pictures in one run of tokens each. One whose tokens see each other is run in one chunk of the prefill."""

    decoder_class = GemmaDecoder

    @classmethod
    def check_model(cls, model: Any) -> None:
        """Raises `UserError` for a mixture of experts, or one that attends in both directions everywhere."""
        check_text(model.config.get_text_config())


class GemmaPictures(NativeSizePictures):
    """A picture of at most 280 tokens, as of the published files."""

    def most_rows(self, config: PreTrainedConfig) -> int:
        return isqrt(280)


# model_type -> record.
FAMILIES = {
    "gemma4": Family(
        "gemma4", lambda config: soundless(), GemmaTraining, GemmaTarget, GemmaPictures(),
        texts={
            **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma3n_text"), Text(scales_embeddings=True)),
            "gemma4_text": Text(scales_embeddings=True, dspark="Gemma4DSparkModel"),
        },
        unread=("vllm", "sglang"),
    ),
}  # fmt: skip


class GemmaTargetConfig(SeeingSection):
    """A Gemma 4 target: published weights, or a tiny one that a recipe spells out and trains itself."""

    families: ClassVar[Mapping[str, Family]] = FAMILIES
    lookalikes: ClassVar[Mapping[str, str]] = {
        "gemma4_unified": "it has no tower (12B): patches enter the language model as they are, which is not read "
        "here; use E2B, E4B or 31B",
    }

    # The dense sizes with a tower: E2B, E4B, 31B. The tower of sounds of the two smaller ones is not read. Inline
    # configs are of model types gemma4_text and gemma4_vision.
    kind: Literal["gemma4"]
    # Inline config of a target that a `train` stage with `model: target` makes from scratch.
    language_model: UnevenModel | None = None

    @model_validator(mode="after")
    def _held_whole(self) -> Self:
        if self.tensor_parallel_size > 1:
            problem = "layers of a Gemma 4 differ in their heads, and some read another's keys; it was never cut here"
            raise Refused("tensor_parallel_size", problem, "leave it out: device_map: auto spreads the target")
        return self

    def joined(self, text: PreTrainedConfig, vision: PreTrainedConfig, ids: TokenIds) -> PreTrainedConfig:
        import transformers

        check_half(vision, "gemma4_vision")
        check_half(text, "gemma4_text", "language_model")
        check_text(text)
        ids.put_into(text)
        return transformers.Gemma4Config(
            text_config=text.to_dict() | {"vocab_size_per_layer_input": ids.vocab_size},
            vision_config=vision.to_dict(), audio_config=None, image_token_id=ids.image,
            video_token_id=None, audio_token_id=None, boi_token_id=ids.vision_start, eoi_token_id=ids.vision_end,
            tie_word_embeddings=bool(config_value(text, "tie_word_embeddings", True)),
        )  # fmt: skip
