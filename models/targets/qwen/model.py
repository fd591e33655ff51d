"""Qwen-VL (2, 2.5 and 3) and Qwen3.5: how its towers are run, its parts, and the cached and the training forward.

A tower reads a picture whole, in as many patches as it has; positions have three coordinates and are ours
(`core/positions.py`): transformers' own go 1-D, without a word, where `mm_token_type_ids` is missing.
Letters: B or R rows, T tokens or places, N new positions, P patches, C numbers of a patch, n visual tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ....core.batch import TEXT, Batch
from ....core.json_types import JsonObject
from ....core.pictures import Picture
from ....core.positions import PositionScheme, Resume, place_positions
from ....core.states import places_of, put_at, uploaded
from ...decoding.decoder import CachedDecoder, PromptRows
from ...hub import num_deepstack
from ...packed_row import last_states
from ...parts import Part, TokenIds
from ...training import ModelTraining
from ..native_pictures import no_picture
from .windows import tower_inputs, use_windows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def qwen_config(kind: str, text: JsonObject, vision: JsonObject, ids: TokenIds) -> PreTrainedConfig:
    """Join the inline halves of a tiny Qwen-VL; `model_type` of the text config may name the mixture of experts."""
    from transformers import CONFIG_MAPPING

    family = str(text.get("model_type", kind)).removesuffix("_text")
    assert family.startswith(kind) and ids.video is not None, (kind, family, ids)
    of_text = {key: value for key, value in text.items() if key != "model_type"}
    of_text |= {"vocab_size": ids.vocab_size, "bos_token_id": ids.bos, "eos_token_id": ids.eos}
    of_vision = {key: value for key, value in vision.items() if key != "model_type"}
    config: Callable[..., PreTrainedConfig] = CONFIG_MAPPING[family]  # each kind has its own keywords
    return config(
        text_config=of_text | {"pad_token_id": ids.pad},
        vision_config=of_vision,
        image_token_id=ids.image,
        video_token_id=ids.video,
        vision_start_token_id=ids.vision_start,
        vision_end_token_id=ids.vision_end,
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
    )


def position_scheme(config: PreTrainedConfig, resume: Resume) -> PositionScheme:
    """The position scheme of `config`; Qwen2.5-VL alone counts seconds."""
    per_second = config.vision_config.tokens_per_second if config.model_type == "qwen2_5_vl" else None
    return PositionScheme(3, per_second, resume)


@dataclass(frozen=True)
class TowerOutput:
    """A tower's features of pictures."""

    features: Tensor  # [n,D]
    deepstack: tuple[Tensor, ...]  # [n,D] for each of the first decoder layers (Qwen3-VL)


def see_patches(model: PreTrainedModel, patches: Tensor, pictures: Sequence[Picture]) -> TowerOutput:
    """Run the tower over patches [P,C] of pictures that are read whole."""
    grids = [picture.whole for picture in pictures]
    assert grids and all(grid is not None for grid in grids), "pictures in tiles, and the tower reads them whole"
    sizes = torch.tensor([[g.frames, g.rows, g.columns] for g in grids if g is not None])
    assert int(sizes.prod(1).sum()) == len(patches), f"{len(patches)} patches for grids {sizes.tolist()}"
    tower = model.model.visual
    weight = next(tower.parameters())
    # Under a device map it may lie elsewhere than the embedding; offloaded, it lies nowhere.
    device = patches.device if weight.is_meta else weight.device
    output = tower(patches.to(device, weight.dtype), return_dict=True, **tower_inputs(tower, sizes, device))
    return TowerOutput(output.pooler_output, tuple(output.get("deepstack_features") or ()))


def added_behind(deepstack: Sequence[Tensor], visual: Tensor) -> dict[str, Any]:
    """Keywords of a Qwen3-VL's decoder that `use_places` has changed: what is added after its first layers, [n,D] each,
    at the n of its places that are `visual` (bool, on the CPU); none in other families.
    """
    if not deepstack:
        return {}
    places = uploaded(visual.flatten().nonzero()[:, 0], deepstack[0].device)
    return {"visual_pos_masks": places, "deepstack_visual_embeds": list(deepstack)}


def use_places(model: PreTrainedModel) -> None:
    """Let a Qwen3-VL's decoder add visual states at places; at a mask's, transformers waits for the GPU each time."""
    if num_deepstack(model.config):
        model.model.language_model._deepstack_process = _added_at


def _added_at(hidden: Tensor, places: Tensor, states: Tensor) -> Tensor:
    """[B,T,D] with `states` [n,D] added at `places` [n] of all rows in turn, or where a mask [B,T] is True."""
    places = places.to(hidden.device)
    if places.dtype == torch.bool:
        places = places.flatten().nonzero()[:, 0]
    return hidden.flatten(0, 1).index_add(0, places, states.to(hidden)).view_as(hidden)


class QwenDecoder(CachedDecoder):
    """A Qwen-VL in eval mode; `resume` says where text goes on after a clip."""

    def __init__(self, model: nn.Module, *, num_token_ids: int, resume: Resume = "max_plus_one"):
        super().__init__(model, num_token_ids=num_token_ids)
        config = self.model.config
        use_windows(config.vision_config)
        use_places(self.model)
        self.scheme = position_scheme(config, resume)
        self.num_deepstack = num_deepstack(config)

    def see(self, pixels: Tensor, pictures: Sequence[Picture] = ()) -> Any:
        """`TowerOutput` of patches [P,C]."""
        return see_patches(self.model, pixels, pictures)

    def _features(self, encoded: Any, pictures: Sequence[Picture], pool: int) -> Tensor:
        assert pool == 1, "Qwen-VL's mergers read patches as they are"
        return encoded.features

    def _deepstack_of(self, encoded: Any) -> tuple[Tensor, ...]:
        return () if encoded is None else encoded.deepstack

    def _extra_inputs(self, prompts: PromptRows, start: int, stop: int) -> Mapping[str, object]:
        if prompts.visual is None or not (here := prompts.visual[:, start:stop]).any():
            return {}
        number = (prompts.visual.flatten().cumsum(0) - 1).view_as(prompts.visual)[:, start:stop][here]
        chosen = uploaded(number, prompts.embeds.device)
        return added_behind([part.index_select(0, chosen) for part in prompts.deepstack], here)

    def coordinates(self, positions: Tensor) -> Tensor:
        """[3,R,N]: what stands after a prompt is text, and counts alike in all three."""
        return positions if positions.dim() == 3 else positions[None].expand(3, -1, -1)


class QwenTraining(ModelTraining):
    """The training forward over a Qwen-VL: the common loss over states of its own."""

    def __init__(
        self, model: PreTrainedModel, trainable: Sequence[Part], *, resume: Resume = "max_plus_one", **settings: Any
    ):
        super().__init__(model, trainable, **settings)
        self.scheme = position_scheme(model.config, resume)
        use_windows(model.config.vision_config)
        use_places(model)

    @staticmethod
    def parts_of(model: PreTrainedModel) -> dict[Part, nn.Module]:
        """The mergers are what LLaVA calls the projector; the LM head belongs to the language model."""
        rest = dict(model.model.visual.named_children())
        mergers = [rest.pop("merger"), *cast(nn.ModuleList, rest.pop("deepstack_merger_list", nn.ModuleList()))]
        return {
            "vision_tower": nn.ModuleList(rest.values()),
            "projector": nn.ModuleList(mergers),
            "language_model": nn.ModuleList([model.model.language_model, model.lm_head]),
        }

    def hidden_states(self, batch: Batch) -> Tensor:
        core, visual = self.model.model, batch.on_host("modality") != TEXT
        real = batch.on_host("attention_mask")
        # Every rank runs its tower in every step; where no row has a picture, over one that changes nothing.
        pixels = None if batch.num_dummy_images else batch.pixels
        vision, pictures = self.model.config.vision_config, batch.pictures
        numbers = 3 * vision.temporal_patch_size * vision.patch_size**2
        embeds = core.get_input_embeddings()(batch.ids)
        nobody = no_picture(vision.spatial_merge_size, numbers, batch.ids.device)
        output = see_patches(self.model, *(nobody if pixels is None else (pixels, pictures)))
        more: dict[str, Any] = {}
        if pixels is None:
            nothing = torch.stack([part.sum() for part in (output.features, *output.deepstack)]).sum()
            embeds = embeds + 0.0 * nothing.to(embeds)
        else:
            embeds = put_at(embeds, places_of(visual, embeds.device), output.features)
            more = added_behind(output.deepstack, visual[real] if batch.packed else visual)
        positions, _ = place_positions(batch.on_host("modality"), real, batch.pictures, self.scheme)
        return last_states(core.language_model, batch, embeds, uploaded(positions, embeds.device), **more)
