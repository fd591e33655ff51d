"""LLaVA as something to train: its parts, its loss, how it is assembled and saved.

The drafters of the `lvlm` track and the demo's tiny target are of the same classes (TABED, appendix H.1:
drafts are LLaVA-1.5 with a small language model), so they share one training forward. LLaVA-NeXT and
LLaVA-OneVision are the same parts and a newline, `models/pictures.py`.
Letters: B rows, T tokens, I images, D width, V vocabulary, S supervised tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..core.batch import TEXT, Batch
from ..core.errors import UserError
from ..core.loss import StepLoss
from ..core.states import TargetStates, at_places, places_of, put_at
from .hub import config_value
from .internvl import see_tiles
from .lora import LoraConfig, add_adapters
from .packed_row import last_states
from .pictures import Packing

Part = Literal["vision_tower", "projector", "language_model"]
PARTS: tuple[Part, ...] = ("vision_tower", "projector", "language_model")

# model_type of transformers' configs -> config and model.
Family = Literal["llava", "llava_next", "llava_onevision"]
# A config is a callable here: each family has its own keywords.
FAMILIES: dict[str, tuple[Callable[..., PreTrainedConfig], type[PreTrainedModel]]] = {
    "llava": (LlavaConfig, LlavaForConditionalGeneration),
    "llava_next": (LlavaNextConfig, LlavaNextForConditionalGeneration),
    "llava_onevision": (LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration),
}


@dataclass(frozen=True)
class TokenIds:
    """The ids that a model must share with its target (a published draft's own are not to be trusted)."""

    vocab_size: int
    image: int
    bos: int | None  # None: a text begins with nothing (Qwen)
    eos: int
    pad: int
    video: int | None = None  # the placeholder of clips, where it is not the image's
    # What surrounds each run of placeholders (Qwen-VL).
    vision_start: int | None = None
    vision_end: int | None = None


def llava_config(
    text: PreTrainedConfig,
    vision: PreTrainedConfig,
    ids: TokenIds,
    *,
    vision_feature_layer: int = -2,
    family: Family = "llava",
) -> PreTrainedConfig:
    """Join two configs into a LLaVA (projector: linear, exact GELU, linear; LLaVA-1.5: layer -2 without CLS).

    Raises `UserError` where the tower has no such layer.

    Args:
        family: NeXT and OneVision get a newline and their resolutions, in multiples of the tower's own.
    """
    if not -vision.num_hidden_layers - 1 <= vision_feature_layer <= vision.num_hidden_layers:
        raise UserError(
            f"vision_feature_layer is {vision_feature_layer}, and the tower has {vision.num_hidden_layers} layers",
            hint="-2 is the last but one; null takes the family's",
        )
    text.vocab_size = ids.vocab_size
    text.bos_token_id, text.eos_token_id, text.pad_token_id = ids.bos, ids.eos, ids.pad
    own: dict[str, Any] = {}
    # `default` leaves the first state out, CLIP's CLS; SigLIP has none.
    strategy = "full" if vision.model_type.startswith("siglip") else "default"
    if family != "llava_onevision":
        patches = (vision.image_size // vision.patch_size) ** 2
        own["image_seq_length"] = patches + (0 if strategy == "default" else 1)
    elif ids.video is not None:
        own["video_token_index"] = ids.video
    if family != "llava":
        published = FAMILIES[family][0]()
        tile = published.vision_config.image_size
        own["image_grid_pinpoints"] = [
            [side // tile * vision.image_size for side in pair] for pair in published.image_grid_pinpoints
        ]
    return FAMILIES[family][0](
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
        **own,
    )


def placeholder_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Ids that stand for images and clips in a prompt, and are never emitted."""
    names = ("image_token_index", "video_token_index", "image_token_id", "video_token_id", "audio_token_id")
    ids = (config_value(config, name) for name in names)
    return tuple({value for value in ids if value is not None})


def language_model_of(model: Any) -> nn.Module:
    """The decoder of a vision-language model, or of a causal language model, without the LM head."""
    return dict(model.model.named_children()).get("language_model", model.model)


def is_tied(config: PreTrainedConfig) -> bool:
    """Whether embedding and LM head are one matrix; Qwen-VL's text configs leave that to the whole one."""
    return bool(config_value(config.get_text_config(), "tie_word_embeddings", config.tie_word_embeddings))


def new_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of the config's family with random weights."""
    return FAMILIES[config.model_type][1](config)


def assemble(
    config: PreTrainedConfig,
    *,
    language_model: PreTrainedModel | None = None,
    vision_tower: nn.Module | None = None,
    generator: torch.Generator | None = None,
) -> PreTrainedModel:
    """A float32 LLaVA whose halves are taken over where given; a vocabulary that grows gets rows near the mean.

    Args:
        language_model: a causal language model of the config's shape, with at most the config's vocabulary.
        vision_tower: a tower of the config's shape.
        generator: draws the new vocabulary rows.
    """
    model = new_model(config).float()
    if language_model is not None:
        if len(_vocabulary_weights(language_model)[0]) < config.text_config.vocab_size:
            grow_vocabulary(language_model, config.text_config.vocab_size, generator)
        model.model.language_model.load_state_dict(language_model.model.state_dict())
        model.lm_head.load_state_dict(language_model.lm_head.state_dict())
    if vision_tower is not None:
        model.model.vision_tower.load_state_dict(vision_tower.state_dict())
    return model


@torch.no_grad()
def grow_vocabulary(model: PreTrainedModel, vocab_size: int, generator: torch.Generator | None) -> None:
    """Add rows drawn from N(mean, 1e-5 cov) of the old ones, as the targets' own conversion to 32064 rows did.

    Embedding and head are resized in place. A draw from that Gaussian is the mean plus a random
    combination of the centred rows, which needs no Cholesky factor.
    """
    tables = _vocabulary_weights(model)
    old_size = len(tables[0])
    fresh = [_rows_near_mean(table, vocab_size - old_size, generator) for table in tables]
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for table, rows in zip(_vocabulary_weights(model), fresh, strict=True):
        table[old_size:] = rows


def _vocabulary_weights(model: PreTrainedModel) -> list[Tensor]:
    """Weights [V,D] of the embedding and, where it is not the same matrix, of the LM head."""
    embedding, head = (cast(Tensor, m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    return [embedding] if embedding is head else [embedding, head]


def _rows_near_mean(weight: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    mean = weight.mean(0)
    mix = torch.randn(count, weight.shape[0], generator=generator)
    return mean + (1e-5 / weight.shape[0]) ** 0.5 * mix @ (weight - mean)


class LlavaTraining(nn.Module):
    """The training forward over a LLaVA of any family.

    `forward(batch)` is what the engine calls, so that ZeRO-3 gathers weights by module call; nothing
    reads a weight outside its own module. The vision tower runs without gradients where it is frozen.
    """

    def __init__(
        self,
        llava: PreTrainedModel,
        trainable: Sequence[Part],
        *,
        gradient_checkpointing: bool,
        lora: LoraConfig | None = None,
    ):
        super().__init__()
        self.llava = llava
        self.packing = Packing(llava.model)
        self.trains_vision = "vision_tower" in trainable
        for part, module in self.by_part().items():
            module.requires_grad_(part in trainable)
        decoder: Any = language_model_of(llava)
        if lora is not None:
            llava.lm_head.requires_grad_(False)
            add_adapters(decoder, lora)
        if is_tied(llava.config):
            llava.tie_weights()
        if gradient_checkpointing:
            decoder.gradient_checkpointing_enable({"use_reentrant": False})

    def by_part(self) -> dict[Part, nn.Module]:
        """The model's modules by part."""
        return llava_parts(self.llava)

    def parts(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Trainable parameters by part, for the optimizer's groups."""
        by_part: dict[str, list[tuple[str, nn.Parameter]]] = {}
        seen: set[int] = set()
        for part, module in self.by_part().items():
            named = [(f"{part}.{n}", p) for n, p in module.named_parameters() if p.requires_grad and id(p) not in seen]
            seen.update(id(p) for _, p in named)
            if named:
                by_part[part] = named
        return by_part

    def forward(
        self, batch: Batch, states: TargetStates | None = None, target_choice: Tensor | None = None
    ) -> StepLoss:
        """Next-token cross-entropy summed over the supervised tokens, and how many of them were right.

        Args:
            states: the target's; plain next-token training reads none.
            target_choice: [S] the target's most likely tokens; how often they are also ours is "agreement".
        """
        hidden = self.hidden_states(batch)  # [B,T,D]
        places = places_of(batch.predicting, hidden.device)
        labels = at_places(batch.ids, places, 1)  # [S]
        # The head runs on supervised positions only: at 32064 rows it is most of a small draft's cost.
        logits = self.scores(at_places(hidden, places)).float()  # [S,V]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        choice = logits.argmax(-1)
        metrics = {"accuracy": (choice == labels).sum()}
        if target_choice is not None:
            metrics["agreement"] = (choice == target_choice).sum()
        return StepLoss(loss, batch.loss_mask[:, 1:].sum(), metrics)

    def scores(self, hidden: Tensor) -> Tensor:
        """[...,D] -> [...,V] of the LM head."""
        scores: Tensor = self.llava.lm_head(hidden)
        return scores

    def hidden_states(self, batch: Batch) -> Tensor:
        """Final states [B,T,D] of the language model, its feature: the LM head is still to come."""
        return hidden_states(self.llava, self.packing, batch, trains_vision=self.trains_vision)

    def selected_features(self, pixels: Tensor) -> Tensor:
        """The tower's states that the projector reads, [I,P,C]."""
        return selected_features(self.llava, pixels)


def hidden_states(llava: PreTrainedModel, packing: Packing, batch: Batch, *, trains_vision: bool = False) -> Tensor:
    """Final states [B,T,D] of any LLaVA's language model for a batch.

    Args:
        packing: of `llava.model`.
        trains_vision: whether the tower takes part in the gradient.
    """
    core = llava.model
    embeds = core.get_input_embeddings()(batch.ids)
    if batch.pixels is not None:
        with torch.set_grad_enabled(trains_vision and torch.is_grad_enabled()):
            vision = selected_features(llava, batch.pixels)
        features = core.multi_modal_projector(vision)  # [I,P,D]
        count = features.shape[0] - batch.num_dummy_images
        real = packing(features[:count], batch.pictures).to(embeds)
        embeds = put_at(embeds, places_of(batch.on_host("modality") != TEXT, embeds.device), real)
        # A dummy image keeps the projector in every rank's graph and changes nothing.
        embeds = embeds + 0.0 * features[count:].sum().to(embeds)
    return last_states(core.language_model, batch, embeds, batch.positions[0])


def selected_features(llava: PreTrainedModel, pixels: Tensor) -> Tensor:
    """States [I,P,C] of the tower's chosen layer for pixels [I,3,S,S]: layer -2 without CLS in LLaVA-1.5."""
    config, tower = llava.config, llava.model.vision_tower
    if config.model_type == "internvl":
        return see_tiles(llava, pixels)
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


def llava_parts(llava: PreTrainedModel) -> dict[Part, nn.Module]:
    """The model's modules by part."""
    core, newline = llava.model, Packing(llava.model)
    return {
        "vision_tower": core.vision_tower,
        # The newline comes between tokens of pictures: it learns with what makes those.
        "projector": core.multi_modal_projector
        if newline.image_newline is None
        else nn.ModuleList([core.multi_modal_projector, newline]),
        # The LM head belongs to the language model.
        "language_model": nn.ModuleList([core.language_model, llava.lm_head]),
    }
