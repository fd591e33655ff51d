"""Models of a recipe in a dry run: their shapes from pinned or inline configs, and their parameters on the meta device.

Letters of a line: a part's name in 16 places, its parameters in 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import ChameleonForConditionalGeneration, PreTrainedConfig

from ...models.drafters.base import DrafterConfig
from ...models.drafters.lvlm import drafter_config
from ...models.generators import LlamaGenTargetConfig, build_text_encoder, model_config
from ...models.llamagen.transformer import LlamaGen, LlamaGenConfig
from ...models.llamagen.vq import VqConfig, VqTokenizer
from ...models.llava import TokenIds
from ...models.sizes import parameter_counts
from ...models.targets.anole import AnoleTargetConfig, anole_shape
from ...models.targets.base import TargetShape, language_shape
from ...models.targets.llamagen import llamagen_shape
from ...models.targets.load import target_config

WORLD_VOCABULARY = 32064  # of an inline target where no stage generates a world


def target_shape(recipe: Any) -> Any:
    """The target's model config at full size. A generated world's vocabulary is its stage's."""
    if recipe.target.draws_images:
        return model_config(recipe.target)
    sizes = [stage.vocabulary for stage in recipe.stages.values() if stage.kind == "generate"]
    ids = TokenIds(sizes[0] if sizes else WORLD_VOCABULARY, 4, 1, 2, 3, 5, 6, 7)
    return target_config(recipe.target, ids, network=False)


def draft_shape(recipe: Any, drafter: Any = None) -> PreTrainedConfig:
    """The model config of a recipe's draft LVLM, or of a stage's own `drafter`."""
    target = target_shape(recipe)
    ids = TokenIds(target.text_config.vocab_size, target.image_token_index, 1, 2, target.pad_token_id or 0)
    return drafter_config(drafter or recipe.drafter, target, ids, network=False)


def target_lines(recipe: Any) -> list[str]:
    """What the target is made of."""
    shape = target_shape(recipe)
    if recipe.target.draws_images:
        return _generator_lines(recipe.target, shape)
    # A draft LVLM has a vocabulary of its own, which must be the target's.
    return parameter_lines(shape, vocabulary=recipe.drafter is None or recipe.drafter.kind == "lvlm")


def drafter_lines(recipe: Any) -> list[str]:
    """What the drafter adds to the target's weights."""
    drafter = recipe.drafter
    if drafter.kind == "lvlm":
        return parameter_lines(draft_shape(recipe), vocabulary=True)
    if drafter.kind == "pruned":
        return _pruned_lines(drafter)
    shape = mirrored_shape(recipe)
    count = drafter_parameters(drafter, recipe)
    if drafter.trains_on is None:
        return [f"  {'parameters':<16} {count:>16,}   nothing is trained"]
    if not shape.draws_images:
        return [f"  {'trainable':<16} {count:>16,}   {drafter.kind}, beside the target's tables"]
    lines = [f"  {'trainable':<16} {count:>16,}"]
    if beside := drafter.frozen_beside(shape):
        lines.append(f"  {'with embedding':<16} {count + beside:>16,}   frozen, the target's")
    return lines


def parameter_lines(config: PreTrainedConfig, *, vocabulary: bool = False) -> list[str]:
    """Parameters of each part, and their sum.

    Args:
        vocabulary: whether its size stands beside the sum.
    """
    counts = parameter_counts(config)
    suffix = f"   vocabulary {config.get_text_config().vocab_size:,}" if vocabulary else ""
    return [*_lines(counts), f"  {'total':<16} {sum(counts.values()):>16,}{suffix}"]


def drafter_parameters(drafter: DrafterConfig, recipe: Any) -> int:
    """Parameters of a drafter that are trained; it holds no others."""
    return sum(drafter.count(mirrored_shape(recipe)).values())


def mirrored_shape(recipe: Any) -> TargetShape:
    """What drafters mirror of the target."""
    if isinstance(recipe.target, LlamaGenTargetConfig):
        return llamagen_shape(recipe.target.model_config_of())
    if isinstance(recipe.target, AnoleTargetConfig):
        return anole_shape(model_config(recipe.target))
    return language_shape(target_shape(recipe).get_text_config())


def generator_parameters(shape: Any) -> int:
    """Parameters of an image generator's transformer."""
    with torch.device("meta"):
        model = LlamaGen(shape) if isinstance(shape, LlamaGenConfig) else ChameleonForConditionalGeneration(shape)
    return sum(p.numel() for p in model.parameters())


def _lines(counts: Mapping[str, int]) -> list[str]:
    return [f"  {name:<16} {count:>16,}" for name, count in counts.items()]


def _pruned_lines(drafter: Any) -> list[str]:
    kept = f"{1 - drafter.ratio:.0%} of the visual tokens kept" if drafter.ratio else "every visual token kept"
    if drafter.model == "target":
        return [f"  the target's own weights, with a cache of its own; {kept}; nothing is trained"]
    return [*parameter_lines(target_config(drafter.model, None, network=False)), f"  {kept}; nothing is trained"]


def _generator_lines(section: Any, shape: Any) -> list[str]:
    counts, suffix = {"transformer": generator_parameters(shape)}, ""
    if isinstance(getattr(section, "vq", None), VqConfig):
        with torch.device("meta"):
            counts["image tokenizer"] = _all_parameters(VqTokenizer(section.vq))
            text = build_text_encoder(section, vocab_size=400, pad_id=0)
        if text is not None:
            counts["text encoder"], suffix = _all_parameters(text), "   at 400 ids"
    lines = _lines(counts)
    codes = f"{section.num_codes} codes of {shape.vocab_size:,}"
    guidance = f"  images of {section.image_size} pixels, {codes}; guidance {section.cfg_scale:g}"
    return [*lines[:-1], lines[-1] + suffix, guidance]


def _all_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in {id(p): p for p in module.parameters()}.values())
