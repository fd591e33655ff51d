"""What a recipe of the video track would do at full size: parameters, states on disk, steps and what is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from ..core import ranks
from ..data.benchmark_sets import SAMPLES
from ..data.loader import steps_per_epoch
from ..data.shapes.scenarios import WITHOUT_PICTURES
from ..models.drafters.pruned import PrunedConfig
from ..models.drafters.reading import AnyReading, build_reading_head
from ..models.llava import is_tied
from ..models.sizes import parameter_counts
from ..models.targets.load import target_config
from ..trainers.run import Planned
from ..trainers.stages.reading.evaluate import ReadingEvaluateStage
from ..trainers.stages.reading.sources import CachedStates
from ..trainers.stages.reading.train import ReadingTrainStage, training_order
from .dry_run import answers, trainable_counts
from .dry_run_data import generated, on_disk, samples
from .dry_run_publish import publishing
from .dry_run_states import caching, target_of

_GIB = 2**30


def dry_run_reading(recipe: Any, planned: Sequence[Planned]) -> str:
    """The report. Models are built on the meta device from pinned or inline configs."""
    lines = [f"dry run: nothing is written, no network is used ({ranks.world_size()} rank(s))"]
    target = target_of(recipe)
    weights = parameter_counts(target)
    lines += ["", "target", *_parameters(weights)]
    if recipe.drafter is not None:
        lines += ["drafter", *drafter_lines(recipe.drafter, target)]
    for plan in planned:
        stage = plan.stage
        lines += ["", f"stage {plan.name} ({stage.kind})"]
        if stage.kind == "generate":
            lines += [f"  {split}: {sum(counts.values())} records" for split, counts in stage.splits.items()]
        elif stage.kind == "regenerate":
            lines += answers(plan, planned)
        elif stage.kind == "cache":
            lines += caching(plan, planned, recipe.drafter, target, recipe.output)
        elif stage.kind == "evaluate":
            lines += _evaluation(stage)
        elif stage.kind == "publish":
            lines += publishing(plan, recipe)
        elif isinstance(stage, ReadingTrainStage):
            lines += _training(plan, planned, recipe, target, sum(weights.values()))
        else:
            lines += _target_training(plan, planned, target)
    return "\n".join(lines)


def drafter_lines(config: Any, target: PreTrainedConfig) -> list[str]:
    """What a drafter has beside the target's weights."""
    if not isinstance(config, PrunedConfig):
        return [
            f"  {'trainable':<16} {head_parameters(config, target):>16,}   {config.kind}, beside the target's tables"
        ]
    kept = f"{1 - config.ratio:.0%} of the visual tokens kept" if config.ratio else "every visual token kept"
    if config.model == "target":
        return [f"  the target's own weights, with a cache of its own; {kept}; nothing is trained"]
    return [*_parameters(parameter_counts(target_config(config.model, None, network=False))),
            f"  {kept}; nothing is trained"]  # fmt: skip


def head_parameters(config: AnyReading, target: PreTrainedConfig) -> int:
    """Parameters of a head that are trained; it holds no others."""
    text, size = target.get_text_config(), getattr(config, "draft_vocab_size", None)
    with torch.device("meta"):
        head = build_reading_head(config, text, draft_ids=None if size is None else torch.arange(size))
    return sum(p.numel() for p in head.parameters() if p.requires_grad)


def _parameters(counts: dict[str, int]) -> list[str]:
    lines = [f"  {name:<16} {count:>16,}" for name, count in counts.items()]
    return [*lines, f"  {'total':<16} {sum(counts.values()):>16,}"]


def _training(
    plan: Planned, planned: Sequence[Planned], recipe: Any, target: PreTrainedConfig, weights: int
) -> list[str]:
    stage: ReadingTrainStage = plan.stage
    config = stage.drafter or recipe.drafter
    trained = head_parameters(config, target)
    lines = [f"  trains the head ({config.kind}), {trained:,} parameters"]
    found = stage_samples(plan, planned)
    if found is None:
        lines.append("  samples unknown: the data is not on disk and the recipe declares none (expected.samples)")
        steps = stage.steps
    else:
        (text, visual), how = found
        held = round((text + visual) * stage.held_out)
        steps = stage.steps or _steps(stage, text, visual)
        lines.append(f"  samples {text + visual:,} ({how}), {held:,} of them held out; {visual:,} with pictures")
    if steps is not None:
        lines.append(f"  steps {steps:,} at batch {stage.batch_size}, last partial batch kept")
    if stage.source.kind == "online":
        lines.append("  states are computed for each batch: the target runs in every step, nothing is kept")
    elif stage.source.kind == "cached_on_first_epoch":
        lines += caching(plan, planned, recipe.drafter, target, recipe.output)
    else:
        lines.append("  states are read from shards")
    what = "the frozen target"
    if stage.reads_tables:
        own, what = target.get_text_config(), "the target's embedding and LM head"
        weights = (1 if is_tied(target) else 2) * own.vocab_size * own.hidden_size
    # Weights, gradients and float32 moments of the head.
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[recipe.target.dtype]
    memory = (16 if recipe.engine.precision != "fp32" else 20) * trained + size * weights
    where = "per rank" if recipe.target.device_map is None else "over the devices of a rank"
    lines.append(f"  memory {where} about {memory / _GIB:.1f} GiB: weights, gradients and optimizer, and {what}")
    disk = stage.checkpoints.keep * 12 * trained + 4 * trained
    lines.append(f"  disk about {disk / _GIB:.1f} GiB ({stage.checkpoints.keep} checkpoints and the result)")
    return lines


def stage_samples(plan: Planned, planned: Sequence[Planned]) -> tuple[tuple[int, int], str] | None:
    """((without pictures, with pictures), how they are known) of a head's stage; None: not at all."""
    stage = plan.stage
    if not isinstance(stage.source, CachedStates):
        return _counted(plan, planned)
    if stage.expected is not None or stage.source.path is not None:
        return None if stage.expected is None else _declared(stage.expected)
    by_name = {p.name: p for p in planned}
    makers = [by_name[maker] for thing, maker in plan.inputs.items() if thing.split("/")[0] == "states"]
    parts = [_counted(maker, planned) for maker in makers]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not known:
        return None
    counts = sum(c[0] for c, _ in known), sum(c[1] for c, _ in known)
    return counts, known[0][1]


def _counted(plan: Planned, planned: Sequence[Planned]) -> tuple[tuple[int, int], str] | None:
    found, written = on_disk(plan.stage.data), generated(plan, planned)
    if found is not None:
        visual = int(((found.images > 0) | (found.clips > 0)).sum())
        return (len(found) - visual, visual), "measured"
    number, how = samples(plan.stage, written, found)
    if number is None:
        return None
    if how == "declared":
        return _declared(plan.stage.expected)
    text = generated(plan, planned, only=WITHOUT_PICTURES) or 0
    return (text, number - text), how


def _declared(expected: Any) -> tuple[tuple[int, int], str]:
    return ((0, expected.samples) if expected.visual_tokens else (expected.samples, 0)), "declared"


def _steps(stage: ReadingTrainStage, text: int, visual: int) -> int:
    share = 1 - stage.held_out
    kinds = np.repeat([-1, 1], [round(text * share), round(visual * share)])
    return steps_per_epoch(len(training_order(stage, kinds, 0)), stage.batch_size) * (stage.epochs or 0)


def _target_training(plan: Planned, planned: Sequence[Planned], target: PreTrainedConfig) -> list[str]:
    stage = plan.stage
    trained = trainable_counts(stage, target)
    number, how = samples(stage, generated(plan, planned), on_disk(stage.data))
    lines = [f"  trains {', '.join(f'{part} {count:,}' for part, count in trained.items())}"]
    if number is not None:
        lines += [f"  samples {number:,} ({how})", f"  steps {stage.num_steps(number):,} at batch {stage.batch_size}"]
    return lines


def _evaluation(stage: ReadingEvaluateStage) -> list[str]:
    lines = []
    if stage.benchmarks:
        lines.append(f"  benchmarks {', '.join(b.name for b in stage.benchmarks)}")
    if (suite := stage.suite) is not None:
        names = suite.names or ["the sets that it has"]
        rows = suite.data.max_samples or ("all" if not suite.on_hub else f"all (the papers: {SAMPLES})")
        lines.append(
            f"  suite {suite.data.path}: {', '.join(names)}; rows of a set: {rows}; {suite.convention} prompts"
        )
    if stage.lengths:
        lines.append(f"  clips at {', '.join(_length(length) for length in stage.lengths)}")
    lines.append(
        f"  temperatures {', '.join(f'{t:g}' for t in stage.temperatures)}; answers of up to "
        f"{', '.join(map(str, stage.max_new_tokens))} tokens; each decoded plainly, and by"
    )
    for name, method in stage.methods.items():
        what = "the recipe's drafter" if method.drafter is None else f"of stage {method.stage}"
        if method.drafter is not None and method.stage is None:
            what = f"kind {method.drafter.kind}"  # type: ignore[union-attr]
        tree = method.tree.build()
        lines.append(f"    {name}: {what}; tree {tree.name}, {tree.num_levels} levels, at most {_nodes(method)} nodes")
    own = [method.drafter for method in stage.methods.values() if isinstance(method.drafter, PrunedConfig)]
    siblings = {config.model.path: config.model for config in own if config.model != "target"}
    for path, sibling in siblings.items():
        count = sum(parameter_counts(target_config(sibling, None, network=False)).values())
        lines.append(f"  draft {path}: {count:,} parameters")
    return lines


def _nodes(method: Any) -> int:
    """Nodes of its tree, without the root."""
    tree = method.tree
    return {"dynamic": lambda: tree.total - 1, "sage": lambda: tree.max_nodes}.get(
        tree.kind, lambda: tree.build().max_nodes
    )()


def _length(length: int | str) -> str:
    return f"{length} frames" if isinstance(length, int) else f"{length} visual tokens"
