"""Memory of an image generator's evaluation on one GPU, in a dry run: transformer, tokenizer, text encoder, cache of
both rows of guidance, drafters, and a tree's scores.
"""

from __future__ import annotations

from ...models.families.generators import ImageTargetConfig, image_section
from ..run.stage import Planned
from .auto_dtypes import held_bytes
from .evaluation_memory import Memory
from .models import mirrored_shape
from .proposals import proposals

# Parameters of what a recipe names by its path, and a dry run does not look up.
TOKENIZER, T5_XL = 72_000_000, 1_220_000_000


def drawing_memory(plan: Planned) -> Memory:
    """The memory of an evaluation: pictures drawn one by one, or side by side where they are scored alone."""
    stage, recipe = plan.stage, plan.recipe
    section = image_section(recipe.target)
    width, shape = held_bytes(section), mirrored_shape(recipe)
    untimed = stage.drawing.untimed
    rows = (2 if section.cfg_scale != 1 else 1) * (1 if untimed is None else untimed.batch_size)
    nodes = 1 + max(method.policy(grid=shape.grid).max_nodes for method in stage.methods.values())
    positions = section.prompt_places + section.num_codes + nodes
    parts = {f"target's {name}": float(size) for name, size in _target(section, width).items()}
    layers, keys, inner = section.cached_sizes()
    parts["key-value cache"] = 2.0 * rows * layers * keys * positions * width
    held = set()
    for one in proposals(plan, stage.is_drawn):
        weights = 0.0 if one.weights in held else float(width * sum(one.config.count(shape).values()))
        cache = float(one.config.cached_numbers(shape)[0] * rows * positions * width)
        parts["drafters"] = parts.get("drafters", 0.0) + weights
        parts["drafters' caches"] = parts.get("drafters' caches", 0.0) + cache
        held.add(one.weights)
    places = rows * max(section.prompt_places, nodes)
    # Of a layer as in `models/families/memory.py`; the scores of each row in float32, guided, warped and sorted.
    layer = places * (shape.hidden_size * (5 * width + 8) + 3 * inner * width)
    parts["activations"] = layer + 4.0 * (rows + 4) * nodes * shape.vocab_size
    return Memory(parts)


def _target(section: ImageTargetConfig, width: int) -> dict[str, int]:
    """Bytes of each part. What is spelt out lies in float32, but for the transformer; a published T5 in bfloat16."""
    sizes = {name: count * (width if name == "transformer" else 4) for name, count in section.count().items()}
    sizes.setdefault("image tokenizer", 4 * TOKENIZER)
    if section.reads_features:
        sizes.setdefault("text encoder", 2 * T5_XL)
    return sizes
