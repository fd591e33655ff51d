"""Memory of a training on its fullest GPU, in a dry run: weights, gradients and optimizer by ZeRO stage, activations,
and the frozen target beside them.

A recipe's `hardware` says how many ranks there are; without one the ranks of this command count.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...core import ranks
from ...models.llava import is_tied
from ...models.memory import Decoding, activation_bytes, peak
from ...models.sizes import parameter_counts
from ...models.training_memory import (
    SUPERVISED,
    MicroBatch,
    cross_entropy_bytes,
    decoder_activations,
    tower_activations,
)
from .memory import Memory
from .models import drafter_parameters, mirrored_shape, target_shape
from .precision import engine_precision, held_bytes, held_dtype


def num_ranks(recipe: Any) -> int:
    """Of a training: a GPU each, but for a target that one rank spreads over all."""
    if recipe.target.draws_images or getattr(recipe.target, "device_map", None) in (None, "cpu"):
        return recipe.hardware.gpus if recipe.hardware else ranks.world_size()
    return 1


def micro_of(stage: Any, recipe: Any) -> int:
    """Rows of one forward on one rank."""
    return stage.micro_batch_size or -(-stage.batch_size // num_ranks(recipe))


def number_bytes(recipe: Any) -> int:
    """Of a weight in a forward of training."""
    return 4 if engine_precision(recipe) == "fp32" else 2


def engine_parts(total: int, trained: int, stage: Any, recipe: Any) -> dict[str, float]:
    """Weights, gradients and optimizer on each rank, following the ZeRO paper's table (section 3).

    Args:
        total: parameters of the module; `trained` of them learn.
    """
    count, zero, width = num_ranks(recipe), recipe.engine.zero_stage, number_bytes(recipe)
    several = stage.batch_size > micro_of(stage, recipe) * count
    # Under bf16 micro-batches are summed in float32, by ZeRO's stages or where there are several.
    gradients = trained * (4 if width == 4 or zero or several else width)
    states = trained * (8 if width == 4 else 12)  # Adam's two moments, and float32 weights beside lower ones
    return {
        "weights": width * total / (count if zero == 3 else 1),
        "gradients": gradients / (count if zero >= 2 else 1),
        "optimizer": states / (count if zero >= 1 else 1),
    }


def lvlm_parts(stage: Any, recipe: Any, config: PreTrainedConfig, trained: int, patches: int) -> dict[str, float]:
    """Of a draft LVLM, a captioner or a tiny target.

    Args:
        config: of the model that trains.
        patches: that its tower reads for a row.
    """
    micro, width, text = micro_of(stage, recipe), number_bytes(recipe), config.get_text_config()
    positions = micro * stage.data.max_length if stage.packing is None else stage.packing.max_tokens
    learns = "language_model" in stage.trainable
    held = decoder_activations(text, positions, width, learns=learns, checkpointing=stage.gradient_checkpointing)
    if "vision_tower" in stage.trainable:
        held += tower_activations(config.vision_config, micro * patches, width)
    parts = engine_parts(sum(parameter_counts(config).values()), trained, stage, recipe)
    parts |= {"activations": held, "scores": cross_entropy_bytes(text.vocab_size, SUPERVISED * positions, width)}
    objective = stage.objective
    if objective is not None and objective.kind == "distill":
        parts["scores"] = 40.0 * objective.chunk * text.vocab_size
        if objective.probabilities == "online":
            parts |= _frozen(recipe, sum(parameter_counts(target_shape(recipe)).values()), positions)
    return parts


def head_memory(stage: Any, recipe: Any, max_length: int | None) -> Memory:
    """Of a hidden-state head of a language model.

    Args:
        max_length: of its samples; None: nobody knows, and activations are left out.
    """
    config, shape = stage.drafter or recipe.drafter, mirrored_shape(recipe)
    trained = drafter_parameters(config, recipe)
    parts = engine_parts(trained, trained, stage, recipe)
    target, weights = target_shape(recipe), 0
    if stage.reads_tables:
        own = target.get_text_config()
        weights = (1 if is_tied(target) else 2) * own.vocab_size * own.hidden_size
    positions = None
    if stage.packing is not None:
        positions = stage.packing.max_tokens
    elif max_length is not None:
        positions = micro_of(stage, recipe) * max_length
    weights = weights or sum(parameter_counts(target).values())
    parts |= _frozen(recipe, weights, None if stage.reads_tables else positions)
    if positions is None:
        return Memory(parts)
    micro = MicroBatch(
        micro_of(stage, recipe), positions, number_bytes(recipe), held_bytes(recipe.target), objective=stage.objective
    )
    return _with_drafter(parts, config, shape, micro)


def _frozen(recipe: Any, weights: int, positions: int | None) -> dict[str, float]:
    """The frozen target on a rank, and its pass over a micro-batch; None: it makes none."""
    section = recipe.target
    spread = recipe.hardware.gpus if recipe.hardware and section.device_map not in (None, "cpu") else 1
    parts = {"frozen target": held_bytes(section) * weights / spread}
    if positions is not None:
        moment = activation_bytes(target_shape(recipe), held_dtype(section), Decoding(positions))
        parts["the target's pass"] = peak(moment)
    return parts


def image_head_memory(stage: Any, recipe: Any) -> Memory | None:
    """Of a head of an image generator; None: of its tokenizer, its reader, or itself, which only demos train."""
    if stage.model != "drafter":
        return None
    config, shape, section = stage.drafter or recipe.drafter, mirrored_shape(recipe), recipe.target
    trained = drafter_parameters(config, recipe)
    parts = engine_parts(trained, trained, stage, recipe)
    rows, held = micro_of(stage, recipe), held_bytes(section)
    parts["frozen target"] = held * section.count()["transformer"]
    codes = rows * section.num_codes
    micro = MicroBatch(rows, rows * section.prompt_places + codes, number_bytes(recipe), held, codes)
    return _with_drafter(parts, config, shape, micro)


def _with_drafter(parts: dict[str, float], config: Any, shape: Any, micro: MicroBatch) -> Memory:
    own = config.training_memory(shape, micro)
    return Memory(parts, unestimated=config.kind) if own is None else Memory(parts | own)
