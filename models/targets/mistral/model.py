"""Mistral 3 and Pixtral of transformers: how their tower is run, their halves are put together, and they are trained.

The tower reads a picture whole, in as many patches as it has; Mistral 3 merges 2 x 2 of them. Rows of a picture's
tokens end with tokens of text (`[IMG_BREAK]`, `[IMG_END]`), which have embeddings as other text has. Pixtral is a LLaVA
with this tower.
Letters: B rows, T tokens, P patches, C numbers of a patch, n visual tokens, D width, H height, W width in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ....core.batch import Batch
from ....core.errors import UserError
from ....core.json_types import JsonObject
from ....core.pictures import PatchGrid, Picture, whole_picture
from ...decoding.decoder import CachedDecoder
from ...hub import config_value
from ...packed_row import last_states
from ...parts import TokenIds
from ..llava.training import LlavaTraining
from ..whole_pictures import WholePicturesTraining

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MistralKind = Literal["mistral3", "pixtral"]
MISTRAL3, TOWER = "mistral3", "pixtral"  # model types of the whole and of the tower


def merge_of(config: PreTrainedConfig) -> int:
    """Patches along a side of what becomes one token."""
    return int(config_value(config, "spatial_merge_size", 1))


def mistral_config(kind: str, text: PreTrainedConfig, vision: PreTrainedConfig, ids: TokenIds) -> PreTrainedConfig:
    """Join two configs into a Mistral 3 or a Pixtral. Raises `UserError` where the tower is another family's."""
    from transformers import LlavaConfig, Mistral3Config

    if vision.model_type != TOWER:
        raise UserError(
            f"the tower of a {kind} is of model_type pixtral, and this one is a {vision.model_type}",
            key="target.vision_tower.model_type", hint="write pixtral",
        )  # fmt: skip
    text.vocab_size = ids.vocab_size
    text.bos_token_id, text.eos_token_id, text.pad_token_id = ids.bos, ids.eos, ids.pad
    joined: JsonObject = {
        "text_config": text.to_dict(), "vision_config": vision.to_dict(), "image_token_index": ids.image,
        "vision_feature_layer": -1, "tie_word_embeddings": bool(config_value(text, "tie_word_embeddings", False)),
    }  # fmt: skip
    if kind == MISTRAL3:
        return Mistral3Config(**joined)
    return LlavaConfig(**joined, vision_feature_select_strategy="full", image_seq_length=1)


def see_whole(model: PreTrainedModel, patches: Tensor, pictures: Sequence[Picture]) -> Tensor:
    """[n,D] of patches [P,C], row by row, of pictures that are read whole: one pass of the tower for each picture."""
    config, core = model.config, model.model
    side, weight = int(config.vision_config.patch_size), next(core.vision_tower.parameters())
    assert sum(picture.num_tiles for picture in pictures) == len(patches), f"{len(patches)} patches for {pictures}"
    # Under a device map the tower may lie elsewhere than the embedding.
    patches, features = patches.to(weight.device, weight.dtype), list[Tensor]()
    for part, picture in zip(patches.split([picture.num_tiles for picture in pictures]), pictures, strict=True):
        grid = picture.whole
        assert grid is not None, "pictures in tiles, and the tower reads them whole"
        image = part.view(grid.rows, grid.columns, 3, side, side).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
        sizes = [(grid.rows * side, grid.columns * side)]
        seen = core.vision_tower(image[None], image_sizes=sizes, output_hidden_states=True)
        states = seen.hidden_states[config.vision_feature_layer][0]  # [P,C]
        more = (sizes,) if config.model_type == MISTRAL3 else ()
        features.append(core.multi_modal_projector(states, *more))
    return torch.cat(features)


class MistralDecoder(CachedDecoder):
    """A Mistral 3 or a Pixtral in eval mode."""

    def see(self, pixels: Tensor, pictures: Sequence[Picture] = ()) -> Any:
        """[n,D] of patches [P,C]."""
        return see_whole(self.model, pixels, pictures)

    def _features(self, seen: Any, pictures: Sequence[Picture], pool: int) -> Tensor:
        assert pool == 1, "the patches of a picture that is read whole are merged as they are"
        return seen


class MistralTraining(WholePicturesTraining):
    """The training forward over a Mistral 3 or a Pixtral: the common loss over states of its own."""

    parts_of = staticmethod(LlavaTraining.parts_of)

    def hidden_states(self, batch: Batch) -> Tensor:
        """Final states [B,T,D] of the language model."""
        embeds, _ = self._embeds(batch)
        return last_states(self.model.model.language_model, batch, embeds, batch.positions[0])

    def _see(self, pixels: Tensor, batch: Batch) -> Tensor:
        return see_whole(self.model, pixels, batch.pictures)

    def _see_nothing(self, batch: Batch) -> Tensor:
        config = self.model.config
        merge, side = merge_of(config), int(config.vision_config.patch_size)
        patches = torch.zeros(merge**2, 3 * side**2, device=batch.ids.device)
        return see_whole(self.model, patches, [whole_picture(PatchGrid(1, merge, merge, merge))])
