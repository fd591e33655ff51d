"""InternVL 3 of transformers: how its tower is run and its halves are put together.

A picture is cut into tiles; where there are several, one of the whole picture follows (`data/families/`). The projector
reads 2 x 2 patches of a tile as one (pixel shuffle). Everything after it is LLaVA's.
Letters: I tiles, P patches, C channels, S side of a tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ....core.errors import UserError
from ...hub import config_value
from ...parts import TokenIds
from ..llava.model import LlavaDecoder
from ..llava.training import LlavaTraining

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

INTERNVL = "internvl"  # model_type


def internvl_config(text: PreTrainedConfig, vision: PreTrainedConfig, ids: TokenIds) -> PreTrainedConfig:
    """Join two configs into an InternVL.

    Args:
        ids: `TokenIds` of the processor.

    Raises:
        UserError: the tower is another family's, or its patches do not merge 2 x 2.
    """
    from transformers import InternVLConfig

    if vision.model_type != "internvl_vision":
        raise UserError(
            f"an InternVL's tower is of model_type internvl_vision, and this one is a {vision.model_type}",
            key="target.vision_tower.model_type", hint="write internvl_vision",
        )  # fmt: skip
    across = vision.image_size[0] // vision.patch_size[0]
    if across % 2 or vision.image_size[0] % vision.patch_size[0]:
        raise UserError(
            f"a tile of {vision.image_size[0]} pixels has {across} patches of {vision.patch_size[0]}, and 2 x 2 become "
            "one token",
            key="target.vision_tower.image_size", hint="write an even multiple of patch_size",
        )  # fmt: skip
    text.vocab_size = ids.vocab_size
    text.bos_token_id, text.eos_token_id, text.pad_token_id = ids.bos, ids.eos, ids.pad
    return InternVLConfig(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        image_token_id=ids.image,
        image_seq_length=(across // 2) ** 2,
        tie_word_embeddings=bool(config_value(text, "tie_word_embeddings", False)),
    )


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
        """The tower's merged states [I,P/4,4C] that the projector reads of tiles [I,3,S,S]."""
        return see_tiles(self.model, pixels)


class InternVLTraining(LlavaTraining):
    """The training forward over an InternVL: LLaVA's, over merged patches."""

    def selected_features(self, pixels: Tensor) -> Tensor:
        """The tower's merged states that the projector reads, [I,P/4,4C]."""
        return see_tiles(self.model, pixels)
