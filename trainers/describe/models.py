"""The target of a dry run: its shape from pinned or inline configs, and its parameters on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ChameleonForConditionalGeneration

from ...models.drafters.base import DrafterConfig
from ...models.generators import build_text_encoder, model_config
from ...models.llamagen.transformer import LlamaGen, LlamaGenConfig
from ...models.llamagen.vq import VqConfig, VqTokenizer
from ...models.llava import TokenIds
from ...models.sizes import num_parameters, parameter_lines
from ...models.targets.anole import anole_shape
from ...models.targets.base import TargetShape, language_shape
from ...models.targets.llamagen import llamagen_shape
from ...models.targets.load import target_config

SYNTHETIC_VOCABULARY = 32064  # of an inline target where no stage generates a synthetic dataset


def target_shape(recipe: Any) -> Any:
    """The target's model config at full size. A synthetic dataset's vocabulary is its stage's."""
    if recipe.target.draws_images:
        return model_config(recipe.target)
    sizes = [stage.vocabulary for stage in recipe.stages.values() if stage.kind == "generate"]
    ids = TokenIds(sizes[0] if sizes else SYNTHETIC_VOCABULARY, 4, 1, 2, 3, 5, 6, 7)
    return target_config(recipe.target, ids, network=False)


def target_lines(recipe: Any) -> list[str]:
    """What the target is made of."""
    shape = target_shape(recipe)
    if recipe.target.draws_images:
        return _generator_lines(recipe.target, shape)
    # A draft LVLM has a vocabulary of its own, which must be the target's.
    return parameter_lines(shape, vocabulary=recipe.drafter is None or recipe.drafter.kind == "lvlm")


def drafter_parameters(drafter: DrafterConfig, recipe: Any) -> int:
    """Parameters of a drafter that are trained; it holds no others."""
    return sum(drafter.count(mirrored_shape(recipe)).values())


def mirrored_shape(recipe: Any) -> TargetShape:
    """What drafters mirror of the target."""
    config = target_shape(recipe)
    if not recipe.target.draws_images:
        return language_shape(config.get_text_config())
    return llamagen_shape(config) if isinstance(config, LlamaGenConfig) else anole_shape(config)


def generator_parameters(shape: Any) -> int:
    """Parameters of an image generator's transformer."""
    with torch.device("meta"):
        model = LlamaGen(shape) if isinstance(shape, LlamaGenConfig) else ChameleonForConditionalGeneration(shape)
    return sum(p.numel() for p in model.parameters())


def _generator_lines(section: Any, shape: Any) -> list[str]:
    counts, suffix = {"transformer": generator_parameters(shape)}, ""
    if isinstance(dict(section).get("vq"), VqConfig):
        with torch.device("meta"):
            counts["image tokenizer"] = num_parameters([VqTokenizer(section.vq)])
            text = build_text_encoder(section, vocab_size=400, pad_id=0)
        if text is not None:
            counts["text encoder"], suffix = num_parameters([text]), "   at 400 ids"
    lines = [f"  {name:<16} {count:>16,}" for name, count in counts.items()]
    codes = f"{section.num_codes} codes of {shape.vocab_size:,}"
    guidance = f"  images of {section.image_size} pixels, {codes}; guidance {section.cfg_scale:g}"
    return [*lines[:-1], lines[-1] + suffix, guidance]
