"""The record of a target family, which the rest of draftsmith asks; the family's folder holds it.

`models/targets/table.py` finds a model's record by the model_type of its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...core.errors import UserError
from ...core.pictures import Picture
from ..decoding.decoder import CachedDecoder
from ..hub import config_value, transformers_class
from ..training import ModelTraining
from .language import LanguageTarget

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Pictures:
    """Pictures that fill a prompt, for dry runs: here in square tiles, of which each patch is a token."""

    def unit(self, config: PreTrainedConfig) -> tuple[int, int]:
        """Sides in pixels of what becomes a token, and of a tile."""
        return config.vision_config.patch_size, config.vision_config.image_size

    def fill(self, config: PreTrainedConfig, positions: int) -> tuple[list[Picture], tuple[int, ...]]:
        """Pictures that take at most so many positions, one at least, and the shape of their pixels."""
        patch, side = self.unit(config)
        across = side // patch
        if not across:
            raise UserError(
                f"a patch of {patch} pixels is larger than the picture of {side}", hint="fix the tower's sizes"
            )
        count = max(1, positions // across**2)
        return [Picture(across)] * count, (count, 3, side, side)


@dataclass(frozen=True)
class Text:
    """Traits of a family's language model that heads mirror, beside its config."""

    norms_input: bool = False  # a head's layer norms what enters it, as the decoder's own does
    qkv_bias: bool = False
    norms_heads: bool = False  # queries and keys
    # Rows of the table are multiplied before the first layer (Gemma: by sqrt(D)). Heads read them as they are stored.
    scales_embeddings: bool = False
    # Pairs of a head that turn by each coordinate, where a config says nothing, and whether the coordinates alternate.
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    # transformers has no tensor parallel plan for its decoder, which is of Llama's shape: ours cuts it.
    lacks_parallel_plan: bool = False
    # A head for several next tokens comes with the weights: one more attending layer (`mtp.*`).
    ships_mtp: bool = False
    dspark: str = ""  # what servers call a DSpark draft with its layers (`drafter.target_layers`); none has one


@dataclass(frozen=True)
class Family:
    """Models of one model_type of transformers."""

    kind: str  # as a recipe's `target` names it; of a section of another package, any name
    # A class, or what finds it when it is asked for: a name of transformers', whose modules are heavy, or a function of
    # a model's config.
    model: Any
    training: type[ModelTraining]
    target: type[LanguageTarget]
    pictures: Pictures | None = None  # None: it reads text alone
    # model_type of the tower, where that makes another family of a model_type (Pixtral's config says llava).
    tower: str = ""
    # Every picture is one tile, and `pixel_values` alone say it; others have conventions of how tiles are packed.
    one_tile: bool = False
    # Whether draft LVLMs read what its image processor makes.
    shares_pictures: bool = False
    # model_type of text configs -> what heads take from them.
    texts: Mapping[str, Text] = field(default_factory=dict)
    # Engine -> heads (eagle, eagle3, dflash) that its class of this model hands states to, as its sources say; and
    # `patched`, where drafters were compared for which our plugin patches it.
    engines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Engines whose class of this model was not read here.
    unread: tuple[str, ...] = ()
    # Whether pictures in engines were compared with ours: engines get none of a family before.
    is_compared: bool = False
    # Whether vLLM's model runner V1 writes draft steps after a picture where earlier keys lie.
    v1_misplaces_drafts: bool = False

    def new(self, config: PreTrainedConfig) -> PreTrainedModel:
        """A model with random weights in the default type."""
        maker = self.class_of(config)
        return getattr(maker, "from_config", maker)(config)

    @property
    def agrees_on_pictures(self) -> bool:
        """Whether engines are known to read its prompts as we do: its pictures were compared, or it reads none."""
        return self.pictures is None or self.is_compared

    @property
    def decoder(self) -> type[CachedDecoder]:
        """The cached forward over its models."""
        return self.target.decoder_class

    def class_of(self, config: PreTrainedConfig) -> Any:
        """The class that holds the weights of a config: transformers', or one of ours in its place."""
        if isinstance(self.model, str):
            return transformers_class(self.model)
        return self.model if isinstance(self.model, type) else self.model(config)


def tower_type(config: PreTrainedConfig) -> str | None:
    """model_type of a config's tower; None: it has none."""
    return config_value(config_value(config, "vision_config"), "model_type")
