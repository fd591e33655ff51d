"""The target of a dry run: its shape from pinned or inline configs, and its parameters on the meta device."""

from __future__ import annotations

from typing import Any

from ...models.drafters.base import DrafterConfig
from ...models.parts import TokenIds
from ...models.targets.base import TargetShape, language_shape
from ...models.targets.drawing import COUNTED_IDS
from ...models.targets.load import target_config
from ...models.targets.sizes import parameter_lines
from ...models.targets.table import ImageTargetConfig, language_section
from ..run.stage import WholeRecipe

SYNTHETIC_VOCABULARY = 32064  # of an inline target where no stage generates a synthetic dataset


def target_shape(recipe: WholeRecipe) -> Any:
    """The target's model config at full size. A synthetic dataset's vocabulary is its stage's."""
    if recipe.target.draws_images:
        return recipe.target.model_config_of()
    ids = TokenIds(recipe.vocabulary or SYNTHETIC_VOCABULARY, 4, 1, 2, 3, 5, 6, 7)
    return target_config(language_section(recipe.target), ids, network=False)


def target_lines(recipe: WholeRecipe) -> list[str]:
    """What the target is made of."""
    shape = target_shape(recipe)
    if recipe.target.draws_images:
        return _generator_lines(recipe.target, shape.vocab_size)
    # A draft LVLM has a vocabulary of its own, which must be the target's.
    return parameter_lines(shape, vocabulary=recipe.drafter is None or recipe.drafter.base_kind == "lvlm")


def drafter_parameters(drafter: DrafterConfig, recipe: WholeRecipe) -> int:
    """Parameters of a drafter that are trained; it holds no others."""
    return sum(drafter.count(mirrored_shape(recipe)).values())


def mirrored_shape(recipe: WholeRecipe) -> TargetShape:
    """What drafters mirror of the target."""
    if recipe.target.draws_images:
        return recipe.target.mirrored()
    return language_shape(target_shape(recipe).get_text_config())


def _generator_lines(section: ImageTargetConfig, num_ids: int) -> list[str]:
    counts = section.count()
    suffix = f"   at {COUNTED_IDS} ids" if "text encoder" in counts else ""
    lines = [f"  {name:<16} {count:>16,}" for name, count in counts.items()]
    codes = f"{section.num_codes} codes of {num_ids:,}"
    guidance = f"  images of {section.image_size} pixels, {codes}; guidance {section.cfg_scale:g}"
    return [*lines[:-1], lines[-1] + suffix, guidance]
