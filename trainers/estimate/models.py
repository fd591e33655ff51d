"""The target of a dry run: its shape from pinned or inline configs, its parameters on the meta device, and what `auto`
becomes on a GPU, as far as any machine can tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...data.families.table import PICTURE_FAMILIES
from ...data.processor_files import processor_of_halves
from ...models.drafters.base import DrafterConfig
from ...models.hub import read_config
from ...models.parts import TokenIds
from ...models.stored import is_on_cpu, stored_dtype
from ...models.targets.base import TargetShape, language_shape
from ...models.targets.drawing import COUNTED_IDS
from ...models.targets.load import target_config
from ...models.targets.sizes import once, parameter_lines
from ...models.targets.table import language_section
from ..run.context import Context
from ..run.stage import WholeRecipe

SYNTHETIC_VOCABULARY = 32064  # of an inline target where no stage generates a synthetic dataset
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def target_shape(recipe: WholeRecipe) -> Any:
    """The target's model config at full size. A synthetic dataset's vocabulary is its stage's."""
    if recipe.target.draws_images:
        return recipe.target.model_config_of()
    section = language_section(recipe.target)
    ids = TokenIds(recipe.vocabulary or SYNTHETIC_VOCABULARY, 4, 1, 2, 3, 5, 6, 7)
    halves = section.halves
    if halves is not None and not all(
        Path(half).is_dir() for half in halves
    ):  # to be fetched: with the two tokens that it lacks
        count = read_config(halves[0], key="target.language_model", network=False).vocab_size
        ids = TokenIds(count + 2, count, 1, 2, count + 1)
    elif halves is not None:
        processor = once(
            f"processor of {halves}", lambda: processor_of_halves(*halves, PICTURE_FAMILIES[section.base_kind])
        )
        ids = Context.token_ids(processor, processor.num_token_ids)
    return target_config(section, ids, network=False)


def target_lines(recipe: WholeRecipe) -> list[str]:
    """What the target is made of, and what `dtype: auto` becomes."""
    section, shape = recipe.target, target_shape(recipe)
    if section.draws_images:
        counts = section.count()
        lines = [f"  {name:<16} {count:>16,}" for name, count in counts.items()]
        lines[-1] += f"   at {COUNTED_IDS} ids" if "text encoder" in counts else ""
        codes = f"{section.num_codes} codes of {shape.vocab_size:,}"
        lines.append(f"  images of {section.image_size} pixels, {codes}; guidance {section.cfg_scale:g}")
    else:
        # A draft LVLM has a vocabulary of its own, which must be the target's.
        lines = parameter_lines(shape, vocabulary=recipe.drafter is None or recipe.drafter.base_kind == "lvlm")
    if section.dtype == "auto":
        name = held_dtype(section)
        why = f"{name}: as stored; float32 on a CPU"
        if section.path is None:
            why = f"{name}: the recipe {'spells it out' if section.halves is None else 'makes it of two halves'}"
        elif not Path(section.path).is_dir():
            why = f"as stored, which a dry run does not look up: counted as {name}; float32 on a CPU"
        lines.append(f"  dtype auto ({why})")
    return lines


def drafter_parameters(drafter: DrafterConfig, recipe: WholeRecipe) -> int:
    """Parameters of a drafter that are trained; it holds no others."""
    return sum(drafter.count(mirrored_shape(recipe)).values())


def mirrored_shape(recipe: WholeRecipe) -> TargetShape:
    """What drafters mirror of the target."""
    if recipe.target.draws_images:
        return recipe.target.mirrored()
    return language_shape(target_shape(recipe).get_text_config())


def held_dtype(section: Any, *, key: str = "target") -> str:
    """float32, bfloat16 or float16: in which a section's weights are counted.

    Raises:
        UserError: `auto` has no answer for weights that are on this disk.
    """
    if section.dtype != "auto":
        return str(section.dtype)
    if section.path is None or is_on_cpu(section):
        return "float32"
    # Of a Hub id a dry run fetches neither weights nor config: most are published in bfloat16.
    return stored_dtype(section.path, section.revision, key=key) if Path(section.path).is_dir() else "bfloat16"


def held_bytes(section: Any) -> int:
    """Bytes of a weight."""
    return BYTES[held_dtype(section)]


def engine_precision(recipe: WholeRecipe) -> str:
    """fp32, bf16 or fp16: what a training is counted in."""
    if recipe.engine.precision != "auto":
        return str(recipe.engine.precision)
    return "fp32" if held_dtype(recipe.target) == "float32" else "bf16"
