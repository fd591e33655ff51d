"""What a recipe would do at full size: parameters, steps, tokens, memory and disk, without a network or weights."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from ..core import ranks
from ..data.records import RecordFile, open_records
from ..models.drafters.lvlm import drafter_config
from ..models.llava import LlavaTraining, TokenIds
from ..models.targets.load import target_config
from ..trainers.run import Planned
from ..trainers.stages.train import TrainStage, check_positions
from .schema import Recipe

_GIB = 2**30


def dry_run(recipe: Recipe, planned: Sequence[Planned]) -> str:
    """The report. Models are built on the meta device from pinned or inline configs."""
    lines = [f"dry run: nothing is written, no network is used ({ranks.world_size()} rank(s))"]
    target, drafter = configs(recipe)
    lines += ["", "target", *_parameters(target)]
    if drafter is not None:
        lines += ["drafter", *_parameters(drafter)]
    for plan in planned:
        lines += ["", f"stage {plan.name} ({plan.stage.kind})"]
        if plan.stage.kind == "generate":
            for split, counts in plan.stage.splits.items():
                lines.append(f"  {split}: {sum(counts.values())} records")
        elif plan.stage.kind == "train":
            config = target if plan.stage.model == "target" else drafter
            assert config is not None
            check_positions(config, plan.stage)
            lines += _training(plan.stage, config, recipe, _generated(plan, planned))
        else:
            names = ", ".join(b.name for b in plan.stage.benchmarks)
            lines.append(f"  benchmarks {names}; modes {', '.join(plan.stage.modes)}; gamma {plan.stage.gamma}")
    return "\n".join(lines)


def configs(recipe: Recipe) -> tuple[LlavaConfig, LlavaConfig | None]:
    """Model configs at full size. A world's vocabulary is its `generate` stage's."""
    sizes = [s.vocab_size for s in recipe.stages.values() if s.kind == "generate"]
    inline = TokenIds(sizes[0] if sizes else 32064, 4, 1, 2, 3)
    target = target_config(recipe.target, inline, network=False)
    assert isinstance(target, LlavaConfig)
    if recipe.drafter is None:
        return target, None
    text = target.text_config
    ids = TokenIds(text.vocab_size, target.image_token_index, 1, 2, target.pad_token_id or 0)
    return target, drafter_config(recipe.drafter, target, ids, network=False)


def parameter_counts(config: LlavaConfig) -> dict[str, int]:
    """Parameters by part, counted on the meta device; the LM head belongs to the language model."""
    with torch.device("meta"):
        module = LlavaTraining(LlavaForConditionalGeneration(config), (), gradient_checkpointing=False)
    core = module.llava.model
    parts = {
        "vision_tower": [core.vision_tower],
        "projector": [core.multi_modal_projector],
        "language_model": [core.language_model, module.llava.lm_head],
    }
    return {name: len_parameters(modules) for name, modules in parts.items()}


def trainable_counts(stage: TrainStage, config: LlavaConfig) -> dict[str, int]:
    """Parameters that a stage trains, by part; with LoRA the adapters'."""
    with torch.device("meta"):
        module = LlavaTraining(
            LlavaForConditionalGeneration(config), stage.trainable, gradient_checkpointing=False, lora=stage.lora
        )
    return {part: sum(p.numel() for _, p in named) for part, named in module.parts().items()}


def len_parameters(modules: Sequence[torch.nn.Module]) -> int:
    """Distinct parameters: a tied head counts once."""
    return sum(p.numel() for p in {id(p): p for m in modules for p in m.parameters()}.values())


def _parameters(config: LlavaConfig) -> list[str]:
    counts = parameter_counts(config)
    lines = [f"  {name:<16} {count:>16,}" for name, count in counts.items()]
    return [*lines, f"  {'total':<16} {sum(counts.values()):>16,}   vocabulary {config.text_config.vocab_size:,}"]


def _training(stage: TrainStage, config: LlavaConfig, recipe: Recipe, generated: int | None) -> list[str]:
    counts = parameter_counts(config)
    trained = trainable_counts(stage, config)
    files = _files(stage) if generated is None else []
    samples, how = _samples(stage, generated, files)
    lines = [f"  trains {', '.join(f'{p} {n:,}' for p, n in trained.items())}; {sum(trained.values()):,} in all"]
    if samples is None:
        lines.append("  samples unknown: the data is not on disk and the recipe declares none (expected.samples)")
        steps = stage.steps
    else:
        steps = stage.num_steps(samples)
        lines.append(f"  samples {samples:,} ({how})")
    if steps is not None:
        lines.append(f"  steps {steps:,} at batch {stage.batch_size}, last partial batch kept")
    patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    rows = f"{steps * stage.batch_size:,}" if steps else "?"
    lines.append(f"  at most {rows} rows of up to {stage.data.max_length:,} ids, {patches} of them for each picture")
    lines += _tokens(stage, files, patches)
    memory = memory_bytes(sum(counts.values()), sum(trained.values()), recipe)
    activations = activation_bytes(stage, config)
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


def activation_bytes(stage: TrainStage, config: LlavaConfig) -> float:
    """A rough upper figure: 34 bytes a position, width and layer (1 layer with checkpointing), and float32 scores."""
    micro = stage.micro_batch_size or -(-stage.batch_size // ranks.world_size())
    text = config.text_config
    layers = 1 + text.num_hidden_layers / 17 if stage.gradient_checkpointing else text.num_hidden_layers
    positions = micro * stage.data.max_length
    return positions * text.hidden_size * 34 * layers + positions * text.vocab_size * 8 / 4


def _files(stage: TrainStage) -> list[RecordFile]:
    """The stage's data, indexed, where all of it is on disk."""
    names = [stage.data.path] if isinstance(stage.data.path, str) else stage.data.path
    if not all(Path(name).is_file() for name in names):
        return []
    with tempfile.TemporaryDirectory() as cache:
        return [open_records(Path(name), Path(cache)) for name in names]


def _samples(stage: TrainStage, generated: int | None, files: Sequence[RecordFile]) -> tuple[int | None, str]:
    if generated is not None:
        return generated, "the world's"
    if files:
        usable = sum(len(f) - len(f.problems) for f in files)
        return min(usable, stage.data.max_samples or usable), "measured"
    if stage.expected is not None:
        return stage.expected.samples, "declared"
    return None, ""


def _tokens(stage: TrainStage, files: Sequence[RecordFile], patches: int) -> list[str]:
    """Text and visual tokens of one epoch; words are counted where the data is there, for a tokenizer is not."""
    if files:
        words = sum(int(abs(f.lengths).sum()) for f in files)
        pictured = sum(int((f.lengths > 0).sum()) for f in files)
        return [f"  an epoch has {words:,} words of text and {pictured * patches:,} visual tokens (measured)"]
    if stage.expected is None:
        return []
    text, visual = stage.expected.text_tokens, stage.expected.visual_tokens
    named = [f"{n:,} {kind}" for n, kind in ((text, "text"), (visual, "visual")) if n is not None]
    return [f"  an epoch has {' and '.join(named)} tokens (declared)"] if named else []


def _generated(plan: Planned, planned: Sequence[Planned]) -> int | None:
    """Records of a split that an earlier stage will write."""
    maker = plan.inputs.get("data")
    source: Any = next((p.stage for p in planned if p.name == maker), None)
    if source is None:
        return None
    names = [plan.stage.data.path] if isinstance(plan.stage.data.path, str) else plan.stage.data.path
    return sum(sum(source.splits[name].values()) for name in names)
