"""What a recipe of the visual track would do at full size: parameters, samples, steps and bytes, without a network."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import ChameleonConfig, ChameleonForConditionalGeneration

from ..core import ranks
from ..core.errors import UserError
from ..data.captioned import num_items
from ..models.drafters.eagle import EagleConfig, EagleHead, eagle_shape
from ..models.drafters.medusa import MedusaConfig, MedusaHead, medusa_shape
from ..models.drafters.sibling import SiblingConfig, check_sibling
from ..models.generators import LlamaGenTargetConfig, build_text_encoder, model_config
from ..models.llamagen.transformer import LlamaGen, LlamaGenConfig, published
from ..models.llamagen.vq import VqConfig, VqTokenizer
from ..trainers.run import Planned
from ..trainers.stages.visual.train import VisualTrainStage
from .dry_run_publish import publishing

_GIB = 2**30


def dry_run_visual(recipe: Any, planned: Sequence[Planned]) -> str:
    """The report. Models are built on the meta device."""
    lines = [f"dry run: nothing is written, no network is used ({ranks.world_size()} rank(s))"]
    target = model_config(recipe.target)
    lines += ["", "target", *_target(recipe.target, target)]
    head = _drafter(recipe.drafter, target) if recipe.drafter is not None else None
    if head is not None:
        lines += ["drafter", *_counts(head)]
    for plan in planned:
        lines += ["", f"stage {plan.name} ({plan.stage.kind})"]
        match plan.stage.kind:
            case "generate":
                lines += [f"  {split}: {count} pictures" for split, count in plan.stage.splits.items()]
            case "encode":
                lines += _encoding(plan.stage, recipe.target)
            case "regenerate":
                lines.append(f"  up to {plan.stage.prompts.max_samples or '?'} prompts x {plan.stage.repeats} pictures")
            case "publish":
                lines += publishing(plan, recipe)
            case "train":
                lines += _training(plan, recipe, target, head)
            case "evaluate":
                where = plan.stage.prompts.path or f"{plan.stage.prompts.classes} classes"
                lines.append(f"  {plan.stage.prompts.max_samples or 'all'} prompts of {where}")
                lines.append(f"  methods: {', '.join(plan.stage.methods)}")
    return "\n".join(lines)


def target_parameters(config: LlamaGenConfig | ChameleonConfig) -> int:
    with torch.device("meta"):
        model = LlamaGen(config) if isinstance(config, LlamaGenConfig) else ChameleonForConditionalGeneration(config)
    return sum(p.numel() for p in model.parameters())


def _target(config: Any, shape: LlamaGenConfig | ChameleonConfig) -> list[str]:
    lines = [f"  {'transformer':<16} {target_parameters(shape):>16,}"]
    if isinstance(config, LlamaGenTargetConfig) and isinstance(config.vq, VqConfig):
        with torch.device("meta"):
            lines.append(f"  {'image tokenizer':<16} {_len(VqTokenizer(config.vq)):>16,}")
            text = build_text_encoder(config, vocab_size=400, pad_id=0)
        if text is not None:
            lines.append(f"  {'text encoder':<16} {_len(text):>16,}   at 400 ids")
    codes = f"{config.num_codes} codes of {shape.vocab_size:,}"
    return [
        *lines,
        f"  images of {config.image_size} pixels, {codes}; guidance {config.cfg_scale:g}",
    ]


def _drafter(config: Any, target: LlamaGenConfig | ChameleonConfig) -> nn.Module:
    with torch.device("meta"):
        if isinstance(config, EagleConfig):
            return EagleHead(eagle_shape(config, target))
        if isinstance(config, MedusaConfig):
            return MedusaHead(medusa_shape(config, target))
        assert isinstance(config, SiblingConfig)
        if not isinstance(target, LlamaGenConfig):
            raise UserError("a LlamaGen cannot draft for this target", where="key drafter", cure="use kind: eagle")
        sibling = published(config.size, grid=target.grid, condition=target.condition)
        check_sibling(target, sibling)
        return LlamaGen(sibling)


def _counts(head: nn.Module) -> list[str]:
    if isinstance(head, LlamaGen):
        return [f"  {'parameters':<16} {_len(head):>16,}   nothing is trained"]
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    lines = [f"  {'trainable':<16} {trained:>16,}"]
    if _len(head) != trained:
        lines.append(f"  {'with embedding':<16} {_len(head):>16,}   frozen, the target's")
    return lines


def _encoding(stage: Any, target: Any) -> list[str]:
    """Samples, and how large their shards get."""
    sample = 0
    if "pixels" in stage.write:
        sample += 3 * target.image_size**2
    if "codes" in stage.write:
        sample += 4 * target.num_codes
    text = getattr(target, "condition", "class") == "text" and "features" in stage.write
    slots = target.model_config_of() if text else None
    most = sample + (2 * slots.num_slots * slots.caption_dim if slots else 0)
    count = stage.source.max_samples
    how = "declared"
    if stage.from_stage is None:
        with contextlib.suppress(UserError):  # not on disk: what the recipe declares stands
            count, how = num_items(stage.source), "measured"
    size = f"{sample:,} to {most:,}" if most > sample else f"{sample:,}"
    lines = [f"  writes {', '.join(stage.write)}: {size} bytes a sample, 2.5 KB of tar around it"]
    if count:
        lines.append(f"  {count:,} samples ({how}): up to {count * (most + 2560) / _GIB:.1f} GiB")
    return lines


def _training(
    plan: Planned, recipe: Any, target: LlamaGenConfig | ChameleonConfig, head: nn.Module | None
) -> list[str]:
    stage: VisualTrainStage = plan.stage
    lines = []
    if stage.model == "drafter":
        assert head is not None
        trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
        lines.append(f"  trains the head, {trained:,} parameters")
        memory = 16 * trained + (2 if recipe.target.dtype != "float32" else 4) * target_parameters(target)
        lines.append(
            f"  memory per rank about {memory / _GIB:.1f} GiB: weights, gradients and optimizer, and the frozen target"
        )
    else:
        lines.append(f"  trains the {stage.model}")
    samples = stage.expected.samples if stage.expected else None
    if samples is not None:
        usable = round(samples * (1 - stage.data.held_out))
        lines.append(f"  samples {samples:,} (declared), {samples - usable:,} of them held out")
        lines.append(f"  steps {stage.num_steps(usable):,} at batch {stage.batch_size}, last partial batch kept")
    elif stage.steps:
        lines.append(f"  steps {stage.steps:,} at batch {stage.batch_size}")
    return lines


def _len(module: nn.Module) -> int:
    return sum(p.numel() for p in {id(p): p for p in module.parameters()}.values())
