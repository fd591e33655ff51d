"""What `auto` becomes on a GPU, as far as a dry run can tell on any machine."""

from __future__ import annotations

from pathlib import Path

from ...models.stored import Held, is_on_cpu, stored_dtype
from ..run.stage import WholeRecipe

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Of a Hub id, whose weights and config a dry run does not fetch: most are published so.
UNKNOWN = "bfloat16"


def held_dtype(section: Held, *, key: str = "target") -> str:
    """float32, bfloat16 or float16: in which a section's weights are counted.

    Raises:
        UserError: `auto` has no answer for weights that are on this disk.
    """
    if section.dtype != "auto":
        return str(section.dtype)
    if section.path is None or is_on_cpu(section):
        return "float32"
    return stored_dtype(section.path, section.revision, key=key) if Path(section.path).is_dir() else UNKNOWN


def held_bytes(section: Held) -> int:
    """Bytes of a weight."""
    return BYTES[held_dtype(section)]


def dtype_text(section: Held) -> str:
    """The setting as a dry run shows it: `auto (bfloat16: as stored; float32 on a CPU)`."""
    if section.dtype != "auto":
        return str(section.dtype)
    name = held_dtype(section)
    if section.path is None:
        return f"auto ({name}: the recipe spells it out)"
    if not Path(section.path).is_dir():
        return f"auto (as stored, which a dry run does not look up: counted as {name}; float32 on a CPU)"
    return f"auto ({name}: as stored; float32 on a CPU)"


def engine_precision(recipe: WholeRecipe) -> str:
    """fp32, bf16 or fp16: what a training is counted in."""
    if recipe.engine.precision != "auto":
        return str(recipe.engine.precision)
    return "fp32" if held_dtype(recipe.target) == "float32" else "bf16"


def precision_text(recipe: WholeRecipe) -> str:
    """The engine's setting as a dry run shows it."""
    asked, found = recipe.engine.precision, engine_precision(recipe)
    if asked != "auto":
        return str(asked)
    return f"auto ({found}" + (")" if found == "fp32" else " on a GPU that computes in it, else fp32)")
