"""What a recipe would do at full size: parameters, steps, tokens, memory and disk, without a network or weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from ..core import ranks
from ..data.images import is_tiled
from ..data.media import Eyes
from ..models.drafters.lvlm import drafter_config
from ..models.llava import TokenIds
from ..models.sizes import empty_model, parameter_counts
from ..models.targets.load import target_config
from ..models.training import training_of
from ..trainers.run import Planned
from ..trainers.stages.train import TrainStage, check_positions
from .dry_run_data import eyes_of, generated, most_patches, on_disk, samples, tokens
from .dry_run_publish import publishing
from .dry_run_suite import evaluation
from .schema import Recipe

_GIB = 2**30


def dry_run(recipe: Recipe, planned: Sequence[Planned]) -> str:
    """The report. Models are built on the meta device from pinned or inline configs."""
    lines = [f"dry run: nothing is written, no network is used ({ranks.world_size()} rank(s))"]
    target, drafter = configs(recipe)
    lines += ["", "target", *_parameters(target)]
    if drafter is not None:
        lines += ["drafter", *_parameters(drafter)]
    positions: dict[str, int] = {}  # of the model that a stage leaves
    for plan in planned:
        lines += ["", f"stage {plan.name} ({plan.stage.kind})"]
        if plan.stage.kind == "generate":
            for split, counts in plan.stage.splits.items():
                lines.append(f"  {split}: {sum(counts.values())} records")
        elif plan.stage.kind == "train":
            config = target if plan.stage.model == "target" else drafter
            assert config is not None
            before = positions.get(plan.inputs.get(plan.stage.model, ""), config.text_config.max_position_embeddings)
            positions[plan.name] = plan.stage.positions or before
            check_positions(positions[plan.name], plan.stage)
            has_own_eyes = (
                plan.stage.model != "target" and recipe.drafter is not None and recipe.drafter.pictures == "own"
            )
            eyes = eyes_of(plan.stage.data, config if has_own_eyes else target)
            lines += _training(plan.stage, config, eyes, recipe, generated(plan, planned))
            lines += _beside(plan.stage, target, recipe)
        elif plan.stage.kind == "regenerate":
            lines += answers(plan, planned)
        elif plan.stage.kind == "publish":
            lines += publishing(plan, recipe)
        else:
            if plan.stage.target is not None:
                lines += _parameters(target_config(plan.stage.target, None, network=False))
            lines += evaluation(plan.stage)
    return "\n".join(lines)


def _beside(stage: TrainStage, target: PreTrainedConfig, recipe: Recipe) -> list[str]:
    """What distillation holds besides the draft."""
    if stage.objective.kind == "cross_entropy":
        return []
    if stage.objective.probabilities == "kept":
        return [f"  distills by {stage.objective.divergence} from kept log-probabilities: no target in memory"]
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[recipe.target.dtype]
    held = size * sum(parameter_counts(target).values())
    chunk = 40 * stage.objective.chunk * target.text_config.vocab_size
    where = "per rank" if recipe.target.device_map is None else "over the devices of a rank"
    return [
        f"  distills by {stage.objective.divergence}: the frozen target beside it takes {held / _GIB:.1f} GiB {where}, "
        f"a chunk of the vocabulary {chunk / _GIB:.1f} GiB"
    ]


def answers(plan: Planned, planned: Sequence[Planned]) -> list[str]:
    """The lines of a `regenerate` stage."""
    stage = plan.stage
    number, how = samples(stage, generated(plan, planned), on_disk(stage.data))
    shown = "unknown: the data is not on disk" if number is None else f"{number:,} ({how})"
    kept = "" if stage.keep_logprobs is None else f"; {stage.keep_logprobs} log-probabilities kept at each token"
    lines = [f"  answers {shown}, each of up to {stage.max_new_tokens} tokens{kept}"]
    if number is not None:
        most = number * stage.max_new_tokens * (4 + 8 * (stage.keep_logprobs or 0))
        lines.append(f"  disk at most {most / _GIB:.1f} GiB of ids" + (" and log-probabilities" if kept else ""))
    return lines


def configs(recipe: Recipe) -> tuple[PreTrainedConfig, PreTrainedConfig | None]:
    """Model configs at full size. A world's vocabulary is its `generate` stage's."""
    sizes = [s.vocab_size for s in recipe.stages.values() if s.kind == "generate"]
    inline = TokenIds(sizes[0] if sizes else 32064, 4, 1, 2, 3, 5, 6, 7)
    target = target_config(recipe.target, inline, network=False)
    if recipe.drafter is None:
        return target, None
    text = target.text_config
    ids = TokenIds(text.vocab_size, target.image_token_index, 1, 2, target.pad_token_id or 0)
    return target, drafter_config(recipe.drafter, target, ids, network=False)


def trainable_counts(stage: TrainStage, config: PreTrainedConfig) -> dict[str, int]:
    """Parameters that a stage trains, by part; with LoRA the adapters'."""
    with torch.device("meta"):
        module = training_of(empty_model(config), stage.trainable, gradient_checkpointing=False, lora=stage.lora)
    return {part: sum(p.numel() for _, p in named) for part, named in module.parts().items()}


def _parameters(config: PreTrainedConfig) -> list[str]:
    counts = parameter_counts(config)
    lines = [f"  {name:<16} {count:>16,}" for name, count in counts.items()]
    return [*lines, f"  {'total':<16} {sum(counts.values()):>16,}   vocabulary {config.get_text_config().vocab_size:,}"]


def _training(
    stage: TrainStage, config: PreTrainedConfig, eyes: Eyes, recipe: Recipe, written: int | None
) -> list[str]:
    counts = parameter_counts(config)
    trained = trainable_counts(stage, config)
    found = on_disk(stage.data)
    number, how = samples(stage, written, found)
    lines = [f"  trains {', '.join(f'{p} {n:,}' for p, n in trained.items())}; {sum(trained.values()):,} in all"]
    if number is None:
        lines.append("  samples unknown: the data is not on disk and the recipe declares none (expected.samples)")
        steps = stage.steps
    else:
        steps = stage.num_steps(number)
        lines.append(f"  samples {number:,} ({how})")
    if steps is not None:
        lines.append(f"  steps {steps:,} at batch {stage.batch_size}, last partial batch kept")
    rows = f"{steps * stage.batch_size:,}" if steps else "?"
    what = "tile" if is_tiled(stage.data.aspect, 1) else "picture"
    each = f"{eyes.processor.num_image_tokens} of them for each {what}"
    lines.append(f"  at most {rows} rows of up to {stage.data.max_length:,} ids, {each}")
    lines += tokens(stage, found, eyes)
    memory = memory_bytes(sum(counts.values()), sum(trained.values()), recipe)
    activations = activation_bytes(stage, config, most_patches(stage.data, eyes))
    lines.append(
        f"  memory per rank about {(memory + activations) / _GIB:.1f} GiB "
        f"({memory / _GIB:.1f} weights, gradients and optimizer; {activations / _GIB:.1f} activations)"
    )
    disk = stage.checkpoints.keep * 12 * sum(trained.values()) + 4 * sum(counts.values())
    lines.append(f"  disk about {disk / _GIB:.1f} GiB ({stage.checkpoints.keep} checkpoints and the result)")
    return lines


def memory_bytes(total: int, trained: int, recipe: Recipe) -> float:
    """Per rank, following the ZeRO paper's table: weights, gradients, float32 moments (and master weights)."""
    ranks_ = ranks.world_size()
    low = recipe.engine.precision != "fp32"
    weights, gradients = (2 if low else 4) * total, (2 if low else 4) * trained
    states = (12 if low else 8) * trained
    stage = recipe.engine.zero_stage
    return (
        weights / (ranks_ if stage == 3 else 1)
        + gradients / (ranks_ if stage >= 2 else 1)
        + states / (ranks_ if stage >= 1 else 1)
    )


def activation_bytes(stage: TrainStage, config: PreTrainedConfig, patches: int) -> float:
    """A rough upper figure: 34 bytes a position, width and layer (with checkpointing one of text), float32 scores.

    Args:
        patches: that the tower reads for a row.
    """
    micro = stage.micro_batch_size or -(-stage.batch_size // ranks.world_size())
    text = config.text_config
    layers = 1 + text.num_hidden_layers / 17 if stage.gradient_checkpointing else text.num_hidden_layers
    positions = micro * stage.data.max_length
    held = positions * text.hidden_size * 34 * layers + positions * text.vocab_size * 8 / 4
    if "vision_tower" in stage.trainable:
        # A tower that trains keeps what its layers made of each patch.
        vision = config.vision_config
        held += micro * patches * vision.hidden_size * 34 * vision.num_hidden_layers
    return held
