"""Qwen-VL (2, 2.5 and 3) and Qwen3.5: how its towers are run and its parts put together, and what trains a tiny one.

A tower reads a picture whole, in as many patches as it has; positions have three coordinates and are ours
(`core/positions.py`): transformers' own go 1-D, without a word, where `mm_token_type_ids` is missing.
Letters: B rows, T tokens, P patches, C numbers of a patch, n visual tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from ....core.batch import TEXT, Batch
from ....core.pictures import PatchGrid, Picture, whole_picture
from ....core.positions import PositionScheme, Resume, place_positions
from ....core.states import places_of, put_at, uploaded
from ...hub import config_value
from ...lora import LoraConfig
from ...packed_row import last_states
from ...parts import Part, TokenIds
from ...training import ModelTraining
from .windows import tower_inputs, use_windows

# model_type of transformers' configs -> config and model.
# A config is a callable here: each family has its own keywords.
QWEN_FAMILIES: dict[str, tuple[Callable[..., PreTrainedConfig], type[PreTrainedModel]]] = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
QwenKind = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
# A recipe's kind -> the model types that it stands for.
QWEN_KINDS: dict[str, tuple[str, ...]] = {
    "qwen2_vl": ("qwen2_vl",),
    "qwen2_5_vl": ("qwen2_5_vl",),
    "qwen3_vl": ("qwen3_vl", "qwen3_vl_moe"),
    "qwen3_5": ("qwen3_5", "qwen3_5_moe"),
}


def qwen_config(kind: str, text: dict[str, Any], vision: dict[str, Any], ids: TokenIds) -> PreTrainedConfig:
    """Join the inline halves of a tiny Qwen-VL; `model_type` of the text config may name the mixture of experts."""
    family = str(text.get("model_type", kind)).removesuffix("_text")
    assert family in QWEN_KINDS[kind] and ids.video is not None, (kind, family, ids)
    of_text = {key: value for key, value in text.items() if key != "model_type"}
    of_text |= {"vocab_size": ids.vocab_size, "bos_token_id": ids.bos, "eos_token_id": ids.eos}
    of_vision = {key: value for key, value in vision.items() if key != "model_type"}
    return QWEN_FAMILIES[family][0](
        text_config=of_text | {"pad_token_id": ids.pad},
        vision_config=of_vision,
        image_token_id=ids.image,
        video_token_id=ids.video,
        vision_start_token_id=ids.vision_start,
        vision_end_token_id=ids.vision_end,
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
    )


def position_scheme(config: PreTrainedConfig, resume: Resume) -> PositionScheme:
    """How the family of `config` counts; Qwen2.5-VL alone counts seconds."""
    per_second = config.vision_config.tokens_per_second if config.model_type == "qwen2_5_vl" else None
    return PositionScheme(3, per_second, resume)


def num_deepstack(config: PreTrainedConfig) -> int:
    """First decoder layers after which visual states are added (Qwen3-VL); 0 in other families."""
    return len(config_value(config.vision_config, "deepstack_visual_indexes") or ())


@dataclass(frozen=True)
class SeenPatches:
    """What a tower makes of pictures."""

    features: Tensor  # [n,D]
    deepstack: tuple[Tensor, ...]  # [n,D] for each of the first decoder layers (Qwen3-VL)


def see_patches(model: Any, patches: Tensor, pictures: Sequence[Picture]) -> SeenPatches:
    """Run the tower over patches [P,C] of pictures that are read whole."""
    grids = [picture.whole for picture in pictures]
    assert grids and all(grid is not None for grid in grids), "pictures in tiles, and the tower reads them whole"
    sizes = torch.tensor([[g.frames, g.rows, g.columns] for g in grids if g is not None])
    assert int(sizes.prod(1).sum()) == len(patches), f"{len(patches)} patches for grids {sizes.tolist()}"
    tower = model.model.visual
    weight = next(tower.parameters())
    # Under a device map it may lie elsewhere than the embedding; offloaded, it lies nowhere.
    device = patches.device if weight.is_meta else weight.device
    seen = tower(patches.to(device, weight.dtype), return_dict=True, **tower_inputs(tower, sizes, device))
    return SeenPatches(seen.pooler_output, tuple(seen.get("deepstack_features") or ()))


def added_behind(deepstack: Sequence[Tensor], visual: Tensor) -> dict[str, Any]:
    """Keywords of a Qwen3-VL's decoder that `use_places` has changed: what is added after its first layers.

    Args:
        deepstack: of each of these layers [n,D]; none in other families.
        visual: bool, on the CPU: of the places that the decoder runs, in order, those of the n.
    """
    if not deepstack:
        return {}
    places = uploaded(visual.flatten().nonzero()[:, 0], deepstack[0].device)
    return {"visual_pos_masks": places, "deepstack_visual_embeds": list(deepstack)}


def use_places(model: Any) -> None:
    """Let a Qwen3-VL's decoder add visual states at places; at a mask's, transformers waits for the GPU each time."""
    if num_deepstack(model.config):
        model.model.language_model._deepstack_process = _added_at


def _added_at(hidden: Tensor, places: Tensor, states: Tensor) -> Tensor:
    """[B,T,D] with `states` [n,D] added at `places` [n] of all rows in turn, or where a mask [B,T] is True."""
    places = places.to(hidden.device)
    if places.dtype == torch.bool:
        places = places.flatten().nonzero()[:, 0]
    return hidden.flatten(0, 1).index_add(0, places, states.to(hidden)).view_as(hidden)


class QwenTraining(ModelTraining):
    """The training forward over a Qwen-VL: LLaVA's loss over other states.

    Args:
        resume: where text goes on after a clip.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        trainable: Sequence[Part],
        *,
        gradient_checkpointing: bool,
        lora: LoraConfig | None = None,
        resume: Resume = "max_plus_one",
    ):
        super().__init__(model, trainable, gradient_checkpointing=gradient_checkpointing, lora=lora)
        self.scheme = position_scheme(model.config, resume)
        use_windows(model.config.vision_config)
        use_places(model)

    def by_part(self) -> dict[Part, nn.Module]:
        """The model's modules by part."""
        return qwen_parts(self.model)

    def hidden_states(self, batch: Batch) -> Tensor:
        """Final states [B,T,D] of the language model."""
        core, visual = self.model.model, batch.on_host("modality") != TEXT
        real = batch.on_host("attention_mask")
        # Every rank runs its tower in every step; where no row has a picture, over one that changes nothing.
        pixels = None if batch.num_dummy_images else batch.pixels
        seen = self._see_nothing(batch) if pixels is None else see_patches(self.model, pixels, batch.pictures)
        embeds = core.get_input_embeddings()(batch.ids)
        more: dict[str, Any] = {}
        if pixels is None:
            nothing = torch.stack([part.sum() for part in (seen.features, *seen.deepstack)]).sum()
            embeds = embeds + 0.0 * nothing.to(embeds)
        else:
            embeds = put_at(embeds, places_of(visual, embeds.device), seen.features)
            more = added_behind(seen.deepstack, visual[real] if batch.packed else visual)
        positions, _ = place_positions(batch.on_host("modality"), real, batch.pictures, self.scheme)
        return last_states(core.language_model, batch, embeds, uploaded(positions, embeds.device), **more)

    def _see_nothing(self, batch: Batch) -> SeenPatches:
        vision = self.model.config.vision_config
        side, merge = vision.patch_size, vision.spatial_merge_size
        numbers = 3 * vision.temporal_patch_size * side**2
        patches = torch.zeros(merge**2, numbers, device=batch.ids.device)
        return see_patches(self.model, patches, [whole_picture(PatchGrid(1, merge, merge, merge))])


def qwen_parts(model: PreTrainedModel) -> dict[Part, nn.Module]:
    """The mergers are what LLaVA calls the projector; the LM head belongs to the language model."""
    rest = dict(model.model.visual.named_children())
    mergers = [rest.pop("merger"), *cast(nn.ModuleList, rest.pop("deepstack_merger_list", nn.ModuleList()))]
    return {
        "vision_tower": nn.ModuleList(rest.values()),
        "projector": nn.ModuleList(mergers),
        "language_model": nn.ModuleList([model.model.language_model, model.lm_head]),
    }
