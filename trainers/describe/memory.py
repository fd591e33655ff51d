"""Memory of an evaluation on its fullest GPU, in a dry run: target, cache, drafters, and what lives for a moment.

Of trainings: `training_memory.py`; of image generators: `image_memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from ...core.section import Section
from ...models.drafters.lvlm import LvlmConfig
from ...models.drafters.pruned import PrunedConfig
from ...models.hub import pinned_config
from ...models.memory import BYTES, Decoding, activation_bytes, cache_bytes, peak, weight_bytes
from ...models.targets.base import language_shape
from ...models.targets.load import target_config
from ...models.targets.parallel import check_cut
from .models import target_shape
from .precision import held_bytes, held_dtype

_GIB = 2**30
# CUDA's context, libraries' workspaces and what the allocator cannot use.
RUNTIME = 2 * _GIB


class Hardware(Section):
    """What a recipe is meant to run on: a dry run says whether it fits. Nothing else reads it."""

    # GPUs of the run, all nodes together.
    gpus: int = Field(ge=1)
    # Of each of them, as it is sold: 80 for an H100 of 80 GB.
    memory_gb: float = Field(gt=0)


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU, by what takes them."""

    parts: dict[str, float] = field(default_factory=dict)
    # Published drafters whose size a dry run, which fetches nothing, does not know.
    uncounted: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """All of it, with what CUDA and its libraries take."""
        return sum(self.parts.values()) + RUNTIME

    def fits(self, hardware: Hardware | None) -> bool:
        """Whether it fits a GPU; nobody knows without one."""
        return hardware is None or self.total <= hardware.memory_gb * _GIB

    def lines(self, hardware: Hardware | None) -> list[str]:
        """Of a dry run."""
        each = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in self.parts.items() if size >= 0.05 * _GIB)
        line = f"  memory of the fullest GPU about {self.total / _GIB:.1f} GiB: {each or 'models under 0.1'}, CUDA 2.0"
        if self.uncounted:
            line += f"; not counted, since a dry run fetches no config: {', '.join(self.uncounted)}"
        if hardware is None:
            return [line]
        verdict = "fits" if self.fits(hardware) else "DOES NOT FIT"
        return [line, f"  {verdict} {hardware.gpus} GPU(s) of {hardware.memory_gb:g} GB each"]


def evaluation_memory(plan: Any) -> Memory:
    """Of an evaluation of a language target.

    Raises:
        UserError: the target cannot be cut over its ranks.
    """
    stage, recipe = plan.stage, plan.recipe
    section = recipe.target if stage.target is None else stage.target
    config = target_shape(recipe) if stage.target is None else target_config(section, None, network=False)
    size, dtype = section.tensor_parallel_size, held_dtype(section)
    if size > 1:
        check_cut(config, size, str(section.path))
    spread = recipe.hardware.gpus if recipe.hardware and section.device_map not in (None, "cpu") else 1
    held = list(_drafters(stage, recipe))
    uncounted = tuple(str(one.path) for one in held if _is_unknown(one))
    drafters = [one for one in held if not _is_unknown(one)]
    nodes = 1 + max(method.policy(grid=1).max_nodes for method in stage.methods.values())
    positions = stage.capacity + nodes
    tapped = any(isinstance(one, PrunedConfig) and one.ratio for one in drafters)
    asked = Decoding(positions, section.prefill_chunk, nodes, tapped, size)
    parts = {f"target's {name.replace('_', ' ')}": size_of / spread
             for name, size_of in weight_bytes(config, dtype, size).items()}  # fmt: skip
    parts["key-value cache"] = cache_bytes(config, dtype, positions, size) / spread
    shape = language_shape(config.get_text_config())
    embedding = BYTES[dtype] * shape.vocab_size * shape.hidden_size
    if size > 1:
        parts["embedding, whole"] = embedding  # gathered for heads that read it
    moments = [peak(activation_bytes(config, dtype, asked))]
    modes = [method.mode for method in stage.methods.values()] + [one.drafting_mode for one in drafters]
    caches = max((len(mode.members) for mode in modes if mode is not None), default=1)
    for one in drafters:
        name, weights, cache, moment = _of_drafter(one, config, section, positions, caches)
        # A second cache of the target's lies where its layers do.
        parts[name] = parts.get(name, 0.0) + weights + cache / (1 if weights else spread)
        moments.append(moment)
    return Memory({**parts, "activations": max(moments)}, uncounted)


def _is_unknown(one: Any) -> bool:
    """Whether it is a published draft LVLM whose config is neither pinned nor on this disk."""
    if not isinstance(one, LvlmConfig) or one.path is None or (one.language_model and one.vision_tower):
        return False
    return not Path(one.path).is_dir() and pinned_config(one.path) is None


def _of_drafter(one: Any, config: Any, section: Any, positions: int, caches: int) -> tuple[str, float, float, float]:
    """Name, weights, cache and activations of a drafter; a draft LVLM has a cache for each mode that it mixes."""
    if isinstance(one, PrunedConfig):
        if one.model == "target":
            return "the target's second cache", 0.0, cache_bytes(
                config, held_dtype(section), positions, section.tensor_parallel_size
            ), 0.0  # fmt: skip
        own, dtype = target_config(one.model, None, network=False), held_dtype(one.model, key="drafter.model")
        asked = Decoding(positions, one.model.prefill_chunk, size=one.model.tensor_parallel_size)
        return "sibling", *_of_model(own, dtype, asked)
    if isinstance(one, LvlmConfig):
        return "draft LVLMs", *_of_model(
            one.config_beside(config), one.dtype or held_dtype(section), Decoding(positions), caches
        )  # fmt: skip
    shape, width = language_shape(config.get_text_config()), held_bytes(section)
    # One layer of the target's width: keys and values of every head, at most.
    return "drafters", width * sum(one.count(shape).values()), 2.0 * positions * shape.hidden_size * width, 0.0


def _of_model(config: Any, dtype: str, asked: Decoding, caches: int = 1) -> tuple[float, float, float]:
    """Weights, caches and activations of a drafter that is a whole model."""
    weights = sum(weight_bytes(config, dtype, asked.size).values())
    cache = caches * cache_bytes(config, dtype, asked.positions, asked.size)
    return weights, cache, peak(activation_bytes(config, dtype, asked))


def _drafters(stage: Any, recipe: Any) -> Iterator[Any]:
    """Sections of the drafters that are held at once: each weight of them once."""
    seen: list[Any] = []
    for method in stage.methods.values():
        named = [stage.drafters.get(name) or _trained(recipe, name) for name in method.names]
        for one in named or [method.drafter if not isinstance(method.drafter, str | None) else recipe.drafter]:
            key = one.model if isinstance(one, PrunedConfig) else one
            if one is not None and hasattr(one, "count") and key not in seen:
                seen.append(key)
                yield one


def _trained(recipe: Any, name: str) -> Any:
    return getattr(recipe.stages.get(name), "drafter", None) or recipe.drafter
