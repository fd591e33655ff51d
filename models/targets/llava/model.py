"""LLaVA of transformers: how its halves are put together, how its tower is run, and the cached and training forward.

The drafters of the `lvlm` track and the demo's tiny target are of the same classes (TABED, appendix H.1:
drafts are LLaVA-1.5 with a small language model), so they share one training forward. LLaVA-NeXT and
LLaVA-OneVision are the same parts and a newline, `packing.py`.
Letters: B rows, T tokens, I images or tiles, P patches, C width of the tower, D width, V vocabulary, S supervised
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....core.batch import TEXT, Batch
from ....core.errors import UserError
from ....core.json_types import JsonObject
from ....core.pictures import Picture
from ....core.pretrained import REGISTRATIONS
from ....core.states import places_of, put_at
from ...decoding.decoder import CachedDecoder
from ...hub import ModelSource, config_value, load_pretrained, transformers_class
from ...packed_row import last_states
from ...parts import Part, TokenIds, _vocabulary_weights, grow_vocabulary
from ...training import ModelTraining
from .made_for_engines import on_projected, reading_of, trained_projector
from .packing import Packing, newline_of, pack

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def _register_tower() -> None:
    from ... import lite0  # noqa: F401


REGISTRATIONS.append(_register_tower)
LlavaKind = Literal["llava", "llava_next", "llava_onevision"]
_WITHOUT_CLS = ("siglip", "efficientnet_lite0")  # how model_types of towers without a class token begin
# model_type -> name of transformers' class.
MODELS: dict[str, str] = {
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
}


def llava_config(
    text: PreTrainedConfig,
    vision: PreTrainedConfig,
    ids: TokenIds,
    *,
    vision_feature_layer: int | None = None,
    family: LlavaKind = "llava",
) -> PreTrainedConfig:
    """Join two configs into a LLaVA (projector: linear, exact GELU, linear; LLaVA-1.5: layer -2 without CLS).

    Raises `UserError` where the tower has no such layer.

    Args:
        vision_feature_layer: None: -2, or -1 where the tower keeps its last state alone.
        family: NeXT and OneVision get a newline and their resolutions, in multiples of the tower's own.
    """
    from transformers import CONFIG_MAPPING

    if vision_feature_layer is None:
        vision_feature_layer = max(-2, -vision.num_hidden_layers - 1)
    if not -vision.num_hidden_layers - 1 <= vision_feature_layer <= vision.num_hidden_layers:
        raise UserError(
            f"vision_feature_layer is {vision_feature_layer}, and the tower has {vision.num_hidden_layers} layers",
            hint="-2 is the last but one; null takes the family's",
        )
    ids.put_into(text)
    of_family: JsonObject = {}
    patches = (vision.image_size // vision.patch_size) ** 2
    # `default` leaves the first state out, CLIP's CLS; towers without one have a state for each patch.
    strategy = "full" if vision.model_type.startswith(_WITHOUT_CLS) else "default"
    if family != "llava_onevision":
        of_family["image_seq_length"] = patches
    elif ids.video is not None:
        of_family["video_token_index"] = ids.video
    if family != "llava":
        published = CONFIG_MAPPING[family]()
        tile = published.vision_config.image_size
        of_family["image_grid_pinpoints"] = [
            [side // tile * vision.image_size for side in pair] for pair in published.image_grid_pinpoints
        ]
    config: Callable[..., PreTrainedConfig] = CONFIG_MAPPING[family]  # each kind has its own keywords
    return config(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        image_token_index=ids.image,
        pad_token_id=ids.pad,
        bos_token_id=ids.bos,
        eos_token_id=ids.eos,
        projector_hidden_act="gelu",
        vision_feature_layer=vision_feature_layer,
        vision_feature_select_strategy=strategy,
        tie_word_embeddings=bool(config_value(text, "tie_word_embeddings", False)),
        **of_family,
    )


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that holds the weights of a config: transformers', but for drafts on a target's projected features."""
    if reading_of(config).is_plain:
        return transformers_class(MODELS[config.model_type])
    return on_projected()


def load_halves(
    config: PreTrainedConfig, language_model: ModelSource, vision_tower: ModelSource, *, section: str,
    revision: str | None = None,
) -> tuple[PreTrainedModel | None, PreTrainedModel | None]:  # fmt: skip
    """The halves of `assemble`, by folder or Hub id; None: one that the recipe spells out. `revision`: of the language
    model; `section`: of the recipe, whose keys name them.
    """

    def load(maker: str, place: ModelSource, key: str, revision: str | None = None) -> PreTrainedModel | None:
        if isinstance(place, dict):
            return None
        loads, key = transformers_class(maker).from_pretrained, f"{section}.{key}"
        return load_pretrained(loads, place, key=key, revision=revision, dtype=torch.float32)

    # A config of both CLIP towers is read for its vision half.
    tower = "CLIPVisionModel" if config.vision_config.model_type == "clip_vision_model" else "AutoModel"
    text = load("AutoModelForCausalLM", language_model, "language_model", revision)
    return text, load(tower, vision_tower, "vision_tower")


def assemble(
    config: PreTrainedConfig,
    *,
    language_model: PreTrainedModel | None = None,
    vision_tower: nn.Module | None = None,
    target_projector: nn.Module | None = None,
    generator: torch.Generator | None = None,
) -> PreTrainedModel:
    """A float32 LLaVA whose halves are taken over where given; a vocabulary that grows gets rows near the mean.

    Args:
        language_model: a causal language model of the config's shape, with at most the config's vocabulary.
        vision_tower: a tower of the config's shape.
        target_projector: of a draft that reads the target's projected features.
        generator: draws the new vocabulary rows.
    """
    model = model_class(config)(config).float()
    if language_model is not None:
        if len(_vocabulary_weights(language_model)[0]) < config.text_config.vocab_size:
            grow_vocabulary(language_model, config.text_config.vocab_size, generator)
        model.model.language_model.load_state_dict(language_model.model.state_dict())
        model.lm_head.load_state_dict(language_model.lm_head.state_dict())
    if vision_tower is not None:
        model.model.vision_tower.load_state_dict(vision_tower.state_dict())
    if target_projector is not None:
        model.model.multi_modal_projector.target.load_state_dict(target_projector.state_dict())
    return model


def selected_features(llava: PreTrainedModel, pixels: Tensor) -> Tensor:
    """States [I,P,C] of the tower's chosen layer for pixels [I,3,S,S]: layer -2 without CLS in LLaVA-1.5."""
    config, tower = llava.config, llava.model.vision_tower
    if not isinstance(config.vision_feature_layer, int):
        raise UserError(f"vision_feature_layer is {config.vision_feature_layer}, and the projector reads one layer",
                        hint="use a target whose config names one layer")  # fmt: skip
    states = tower(pixels.to(next(tower.parameters()).dtype), output_hidden_states=True).hidden_states
    chosen = states[config.vision_feature_layer]
    return chosen[:, 1:] if config.vision_feature_select_strategy == "default" else chosen


def pool_features(features: Tensor, pool: int) -> Tensor:
    """Mean over `pool` x `pool` patches, [I,P,C] -> [I,P/pool^2,C]; the last row and column of an odd side go.

    TABED's mode P (section 3.2) pools the *selected* features; after the projector's GELU it would be something else.
    """
    if pool == 1:
        return features
    side = int(features.shape[1] ** 0.5)
    assert side * side == features.shape[1], f"{features.shape[1]} patches are no square"
    grid = features.transpose(1, 2).unflatten(2, (side, side))
    return F.avg_pool2d(grid, pool).flatten(2).transpose(1, 2)


_TILES = 32  # that a tower reads at once


class LlavaDecoder(CachedDecoder):
    """A LLaVA in eval mode."""

    @property
    def reads_newlines(self) -> bool:
        return newline_of(self.core) is not None

    @property
    def reads_first(self) -> bool:
        return reading_of(self.model.config).first_token

    def selected(self, pixels: Tensor) -> Tensor:
        """The tower's states [I,P,C] that the projector reads of tiles [I,3,S,S]."""
        return selected_features(self.model, pixels)

    def see(self, pixels: Tensor, pictures: Sequence[Picture] = ()) -> Any:
        """The tower's states [I,P,C] that the projector reads: one pass serves every pooling."""
        # Tile by tile they are the same; a tower's layers of a long clip at once would be what fills the memory.
        return torch.cat([self.selected(tiles) for tiles in pixels.split(_TILES)])

    def _features(self, encoded: Any, pictures: Sequence[Picture], pool: int) -> Tensor:
        return pack(self.core.multi_modal_projector(pool_features(encoded, pool)), pictures, newline_of(self.core))


class LlavaTraining(ModelTraining):
    """The training forward over a LLaVA, of any of its kinds."""

    def __init__(self, model: PreTrainedModel, trainable: Sequence[Part], **settings: Any):
        if "vision_tower" in trainable and not reading_of(model.config).is_plain:
            raise UserError(
                "the draft reads the target's projected features, and its stage trains the tower under them",
                key="trainable", hint="leave vision_tower out: an engine runs the target's tower alone",
            )  # fmt: skip
        super().__init__(model, trainable, **settings)
        self.packing = Packing(model.model)

    @staticmethod
    def parts_of(model: PreTrainedModel) -> dict[Part, nn.Module]:
        core, newline = model.model, Packing(model.model)
        return {
            "vision_tower": core.vision_tower,
            # The newline comes between tokens of pictures: it learns with what makes those.
            "projector": trained_projector(model)
            if newline.image_newline is None
            else nn.ModuleList([core.multi_modal_projector, newline]),
            # The LM head belongs to the language model.
            "language_model": nn.ModuleList([core.language_model, model.lm_head]),
        }

    def hidden_states(self, batch: Batch) -> Tensor:
        core = self.model.model
        embeds = core.get_input_embeddings()(batch.ids)
        if batch.pixels is not None:
            with torch.set_grad_enabled(self.trains_vision and torch.is_grad_enabled()):
                vision = self.selected_features(batch.pixels)
            features = core.multi_modal_projector(vision)  # [I,P,D]
            count = features.shape[0] - batch.num_dummy_images
            real = self.packing(features[:count], batch.pictures).to(embeds)
            embeds = put_at(embeds, places_of(batch.on_host("modality") != TEXT, embeds.device), real)
            # A dummy image keeps the projector in every rank's graph and changes nothing.
            embeds = embeds + 0.0 * features[count:].sum().to(embeds)
        if not self.num_unseen:
            return last_states(core.language_model, batch, embeds, batch.positions[0])
        # No first token is supervised, so that the state in its place is read by nobody.
        names, device = ("ids", "attention_mask", "loss_mask", "modality"), batch.attention_mask.device
        cut: dict[str, Any] = {name: batch.on_host(name)[..., 1:] for name in names}
        bare = replace(batch, **cut, positions=batch.on_host("positions")[..., 1:] - 1, pixels=None, states=None)
        bare = bare if device.type == "cpu" else bare.to(device)
        later = last_states(core.language_model, bare, embeds[:, 1:], batch.positions[0, :, 1:] - 1)
        return F.pad(later, (0, 0, 1, 0))

    @property
    def num_unseen(self) -> int:
        return 0 if reading_of(self.model.config).first_token else 1

    def selected_features(self, pixels: Tensor) -> Tensor:
        return selected_features(self.model, pixels)
