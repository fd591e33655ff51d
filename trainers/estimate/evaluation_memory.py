"""Memory of an evaluation on its fullest GPU, in a dry run: target, caches, drafters, captioner, and what lives for a
moment.

Its drafters: `proposals.py`; of trainings: `train_memory.py`; of image generators: `image_memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from ...models.drafters.captioners import LvlmCaptions, num_published
from ...models.drafters.lvlm import LvlmConfig
from ...models.families.generators import language_section
from ...models.families.load import TargetConfig, target_config
from ...models.families.memory import BYTES, cache_bytes, graph_bytes, weight_bytes
from ...models.families.parallel import check_cut
from ...models.hub import has_windows, num_experts, recurrent_layers
from ...models.targets.base import language_shape
from ...models.targets.verification import NODES, lengths_up_to
from ..evaluate.evaluate_settings import EvaluateSettings
from ..run.hardware import Hardware
from ..run.stage import Planned, WholeRecipe
from .auto_dtypes import held_dtype
from .models import target_shape
from .passes import Pass, moment
from .proposals import proposals, sizes_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_GIB = 2**30
# CUDA's context, libraries' workspaces and what the allocator cannot use.
RUNTIME = 2 * _GIB
# Of a process without a GPU: Python with the libraries of a stage (0.42 to 0.53 GiB measured with tiny models).
PROCESS = 0.5 * _GIB


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU, or of a process without one, by what takes them."""

    parts: dict[str, float] = field(default_factory=dict)
    # Published models whose size a dry run, which fetches nothing, does not know.
    uncounted: tuple[str, ...] = ()
    # A kind of drafter whose training cannot be counted without weights, and why (`DrafterConfig.empty`).
    unestimated: str | None = None
    graphs: dict[str, float] = field(default_factory=dict)  # what CUDA graphs add to the parts

    @property
    def on_gpu(self) -> dict[str, float]:
        """The parts on a GPU, where passes are graphs."""
        return self.parts | {name: self.parts.get(name, 0.0) + size for name, size in self.graphs.items()}

    @property
    def total(self) -> float:
        """All of it on a GPU, with what CUDA and its libraries take."""
        return sum(self.on_gpu.values()) + RUNTIME

    def fits(self, hardware: Hardware | None) -> bool:
        """Whether it fits a GPU; nobody knows without one."""
        return hardware is None or self.total <= hardware.memory_gb * _GIB

    def lines(self, hardware: Hardware | None, *, is_here: bool = False) -> list[str]:
        """The lines of a dry run.

        Args:
            is_here: what the recipe reads is on this machine, which may run it: without a GPU, if it has none.
        """
        on_cpu = hardware is None and is_here and not torch.cuda.is_available()
        parts = self.parts if on_cpu else self.on_gpu
        each = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items() if size >= 0.05 * _GIB)
        each = each or "models under 0.1"
        if on_cpu:
            whole = sum(self.parts.values()) + PROCESS
            line = f"  memory of a process, without a GPU, about {whole / _GIB:.1f} GiB: {each}, Python 0.5"
        else:
            line = f"  memory of the fullest GPU about {self.total / _GIB:.1f} GiB: {each}, CUDA 2.0"
        if self.uncounted:
            line += f"; not counted, since a dry run fetches no config: {', '.join(self.uncounted)}"
        if self.unestimated:
            line += f"; not counted: activations of {self.unestimated}"
        if hardware is None:
            return [line]
        verdict, cure = "fits" if self.fits(hardware) else "DOES NOT FIT", ""
        if not self.fits(hardware) and Memory(self.parts).fits(hardware):
            cure = "; without CUDA graphs it does: graphs={target: false, head: false}"
        return [line, f"  {verdict} {hardware.gpus} GPU(s) of {hardware.memory_gb:g} GB each{cure}"]


def evaluation_memory(plan: Planned) -> Memory:
    """The memory of an evaluation of a language target.

    Raises:
        UserError: the target cannot be cut over its ranks.
    """
    stage, recipe = plan.stage, plan.recipe
    section = language_section(recipe.target if stage.target is None else stage.target)
    config = target_shape(recipe) if stage.target is None else target_config(section, None, network=False)
    size, dtype = section.tensor_parallel_size, held_dtype(section)
    if size > 1:
        check_cut(config, size, str(section.path))
    spread = recipe.hardware.gpus if recipe.hardware and section.device_map not in (None, "cpu") else 1
    opened = proposals(plan)
    drafting = [one for one in opened if not one.is_unknown]
    nodes = 1 + max(method.policy(grid=1).max_nodes for method in stage.methods.values())
    tapped = any(one.config.reads_attention for one in drafting)
    asked = Pass(stage.capacity + nodes, section.prefill_chunk, nodes, tapped)
    parts = {f"target's {name.replace('_', ' ')}": size_of / spread
             for name, size_of in weight_bytes(config, dtype, size).items()}  # fmt: skip
    parts["key-value cache"] = cache_bytes(config, dtype, asked.positions, size) / spread
    if size > 1:
        shape = language_shape(config.get_text_config())
        parts["embedding, whole"] = BYTES[dtype] * shape.vocab_size * shape.hidden_size  # for heads that read it
    graphs = _graphs(stage, config, section, asked)
    moments = [moment(config, section, dtype, asked)]
    held = set()
    for one in drafting:
        sizes = sizes_of(one, stage, config, section)
        if one.weights not in held and sizes.weights:
            held.add(one.weights)
            parts[sizes.name] = parts.get(sizes.name, 0.0) + sizes.weights
        cache = sizes.cache / (spread if sizes.is_targets else 1)
        if cache:
            parts["drafters' caches"] = parts.get("drafters' caches", 0.0) + cache
        if sizes.graphs:
            graphs["drafters' caches"] = graphs.get("drafters' caches", 0.0) + sizes.graphs
        moments.append(sizes.moment)
    uncounted = list(dict.fromkeys(str(cast(LvlmConfig, one.config).path) for one in opened if one.is_unknown))
    if stage.captioner is not None:
        captioner = _captioner(plan, config)
        if captioner is None:
            uncounted.append(str(stage.captioner.path))
        else:
            parts["captioner"], described = captioner
            moments.append(described)
    return Memory({**parts, "activations": max(moments)}, tuple(uncounted), graphs=graphs)


def target_memory(plan: Planned) -> Memory | None:
    """The memory of a stage that runs a language target alone: a pass over `batch_size` rows of `data.max_length`.

    None: an engine runs it.
    """
    stage = plan.stage
    if plan.recipe.target.draws_images or stage.engine.is_served:
        return None
    return memory_of_rows(plan.recipe, stage.batch_size, stage.data.max_length)


def memory_of_rows(recipe: WholeRecipe, rows: int, length: int) -> Memory:
    """The memory of a language target's pass over `rows` of `length` ids each."""
    section = language_section(recipe.target)
    config, size, dtype = target_shape(recipe), section.tensor_parallel_size, held_dtype(section)
    spread = recipe.hardware.gpus if recipe.hardware and section.device_map not in (None, "cpu") else 1
    chunk = section.prefill_chunk
    parts = {f"target's {name.replace('_', ' ')}": weights / spread
             for name, weights in weight_bytes(config, dtype, size).items()}  # fmt: skip
    parts["key-value cache"] = rows * cache_bytes(config, dtype, length, size) / spread
    # Masks are of one row each, so rows are counted one by one.
    return Memory(parts | {"activations": rows * moment(config, section, dtype, Pass(length, chunk))})


def _graphs(stage: EvaluateSettings, config: PreTrainedConfig, section: TargetConfig, asked: Pass) -> dict[str, float]:
    """What graphs of the target's passes hold, and how much larger its cache is for them.

    Args:
        asked: of the longest request, with its largest tree.
    """
    if not stage.graphs.target or not _takes_graphs(config, section):
        return {}
    dtype, asked_for = held_dtype(section), stage.graphs.length or stage.capacity
    lengths = lengths_up_to(asked_for + asked.nodes - 1 + NODES[-1])
    largest = next((count for count in NODES if count >= asked.nodes), NODES[-1])
    graphs = graph_bytes(config, dtype, [count for count in NODES if count <= largest], lengths)
    cache = float(cache_bytes(config, dtype, lengths[-1]))
    # A longer request than the graphs are made for gets a cache of its own beside theirs.
    if asked.positions + NODES[-1] <= lengths[-1]:
        cache -= cache_bytes(config, dtype, asked.positions)
    return {"key-value cache": cache, "graphs": graphs}


def _takes_graphs(config: PreTrainedConfig, section: TargetConfig) -> bool:
    """Whether the target's passes can be graphs on a GPU (`targets/verification.py`), as far as a recipe tells."""
    text = config.get_text_config()
    whole = section.tensor_parallel_size == 1 and section.device_map is None
    return whole and not num_experts(text) and not recurrent_layers(text) and not has_windows(text)


def _captioner(plan: Planned, target: PreTrainedConfig) -> tuple[float, float] | None:
    """Weights of what writes captions for mode C, and what lives while it does; None: its size is not known.

    Of a published one the pass is left out: its pictures are one batch of a size that nothing here tells.
    """
    section = plan.stage.captioner
    if not isinstance(section, LvlmCaptions):
        count = num_published(section)
        return None if count is None else (float(count * BYTES[held_dtype(section, key="captioner")]), 0.0)
    config = cast(LvlmConfig, plan.recipe.drafter).config_beside(target)
    vision = config.vision_config
    pictures = max(1, plan.stage.capacity // (vision.image_size // vision.patch_size) ** 2)
    # As many pictures as a prompt can have, each with its caption: rows of one batch.
    positions = plan.stage.capacity + pictures * section.max_new_tokens
    described = cache_bytes(config, "float32", positions) + moment(config, None, "float32", Pass(positions))
    return float(sum(weight_bytes(config, "float32").values())), described
