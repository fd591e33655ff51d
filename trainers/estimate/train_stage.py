"""What `train` stages would do: trained parameters, samples, steps, memory and disk."""

from __future__ import annotations

from collections.abc import Callable, Sized
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from ...data.loader import steps_per_epoch
from ...data.media import ImageReader
from ...data.pictures.tiles import is_tiled
from ...models.drafters.lvlm import LvlmConfig
from ...models.drafters.outside import is_own
from ...models.targets.sizes import config_text, empty_model, once, parameter_counts
from ...models.targets.table import language_section, training_of
from ..run.stage import Planned
from ..train.fit import OutsideStart, TrainSettings
from ..train.settings import RecordsSettings, StatesSettings
from .data import describe_states, generated, image_reader_of, most_patches, on_disk, samples, tokens
from .models import drafter_parameters, held_bytes, target_shape
from .train_memory import Memory, lvlm_parts, muon_shapes, trained_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_GIB = 2**30
_UNKNOWN = "  samples unknown: the data is not on disk and the recipe declares none (expected.samples)"


# Language models that read pictures: drafts, captioners, and a demo's target.


def describe_lvlm(plan: Planned) -> list[str]:
    """A draft LVLM's stage, its captioner's, or its target's."""
    config, image_reader = lvlm_of(plan)
    stage, section, files = plan.stage, plan.recipe.target, on_disk(plan.stage)
    counts, trained = parameter_counts(config), trainable_counts(stage, config)
    number, how = samples(plan, files)
    steps = stage.steps if number is None else stage.num_steps(number)
    rows = f"{steps * stage.batch_size:,}" if steps else "?"
    what = "tile" if is_tiled(stage.data.aspect, 1) else "picture"
    packed = "" if stage.packing is None else f"; packed into rows of up to {stage.packing.max_tokens:,}"
    disk = stage.checkpoints.keep * 12 * sum(trained.values()) + 4 * sum(counts.values())
    lines = [
        f"  trains {', '.join(f'{p} {n:,}' for p, n in trained.items())}; {sum(trained.values()):,} in all",
        _UNKNOWN if number is None else f"  samples {number:,} ({how})",
        *_steps_line(steps, stage),
        f"  at most {rows} rows of up to {stage.data.max_length:,} ids, {image_reader.processor.num_image_tokens} of "
        f"them for each {what}{packed}",
        *tokens(stage, files, image_reader),
        f"  disk about {disk / _GIB:.1f} GiB ({stage.checkpoints.keep} checkpoints and the result)",
    ]
    objective = stage.objective
    if objective is None or objective.kind == "cross_entropy":
        return lines
    if objective.probabilities == "kept":
        return [*lines, f"  distills by {objective.divergence} from kept log-probabilities: no target in memory"]
    target = target_shape(plan.recipe)
    held = held_bytes(section) * sum(parameter_counts(target).values())
    chunk = 40 * objective.chunk * target.text_config.vocab_size
    where = "per rank" if language_section(section).device_map is None else "over the devices of a rank"
    return [
        *lines,
        f"  distills by {objective.divergence}: the frozen target beside it takes {held / _GIB:.1f} GiB "
        f"{where}, a chunk of the vocabulary {chunk / _GIB:.1f} GiB",
    ]


def lvlm_of(plan: Planned) -> tuple[PreTrainedConfig, ImageReader]:
    """The config of the model that a stage on records trains, and what its pictures are read with."""
    stage, recipe = plan.stage, plan.recipe
    target = target_shape(recipe)
    drafter = None if stage.model == "target" else cast(LvlmConfig | None, stage.drafter or recipe.drafter)
    if drafter is None:
        return target, image_reader_of(stage.data, target, language_section(recipe.target).picture_family)
    config = drafter.config_beside(target)
    if drafter.pictures == "own":
        return config, image_reader_of(stage.data, config)
    return config, image_reader_of(stage.data, target, language_section(recipe.target).picture_family)


def describe_target(plan: Planned) -> list[str]:
    """A demo's target, of a recipe whose drafter is a hidden-state head."""
    stage = plan.stage
    trained = trainable_counts(stage, target_shape(plan.recipe))
    number, how = samples(plan, on_disk(stage))
    lines = [f"  trains {', '.join(f'{part} {count:,}' for part, count in trained.items())}"]
    if number is not None:
        lines += [f"  samples {number:,} ({how})", f"  steps {stage.num_steps(number):,} at batch {stage.batch_size}"]
    return lines


def positions_of(plan: Planned) -> int:
    """Positions of the language model that a draft LVLM's stage leaves."""
    if plan.stage.positions is not None:
        return int(plan.stage.positions)
    before = plan.maker(plan.stage.model)
    return int(lvlm_of(plan)[0].text_config.max_position_embeddings) if before is None else positions_of(before)


def trainable_counts(stage: RecordsSettings, config: PreTrainedConfig) -> dict[str, int]:
    """Parameters that a stage trains, by part; with LoRA the adapters'."""

    def count() -> dict[str, int]:
        with torch.device("meta"):
            module = training_of(empty_model(config), stage.trainable, gradient_checkpointing=False, lora=stage.lora)
        return {part: sum(p.numel() for _, p in named) for part, named in module.parts().items()}

    return dict(once(f"trains {stage.trainable} {stage.lora!r} of {config_text(config)}", count))


def _steps_line(steps: int | None, stage: TrainSettings) -> list[str]:
    return [] if steps is None else [f"  steps {steps:,} at batch {stage.batch_size}, last partial batch kept"]


def start_line(start: OutsideStart) -> str:
    """Where a head's first weights come from. The stage compares their files with the drafter's section."""
    if not Path(start.path).is_dir():
        return f"  starts from {start.path} (not on this machine: a Hub id, or a folder that is elsewhere)"
    layout = "draftsmith's layout" if is_own(Path(start.path)) else "an engine's or its authors' layout"
    return f"  starts from {start.path} ({layout})"


def lvlm_memory(plan: Planned) -> Memory:
    """The memory of training a draft LVLM, its captioner or its target."""
    config, image_reader = lvlm_of(plan)
    trained = sum(trainable_counts(plan.stage, config).values())
    return Memory(lvlm_parts(plan.stage, plan.recipe, config, trained, most_patches(plan.stage.data, image_reader)))


# Hidden-state heads of language models.


def describe_head(plan: Planned, order: Callable[[StatesSettings, np.ndarray, int], Sized]) -> list[str]:
    """A hidden-state head's stage.

    Args:
        order: stage, lengths of the samples (below 0: without pictures) and seed -> the samples of an epoch.
    """
    stage, recipe = plan.stage, plan.recipe
    config = stage.drafter or recipe.drafter
    assert config is not None
    total, trained = drafter_parameters(config, recipe), trained_parameters(stage, config, recipe)
    lines = [f"  trains the head ({config.kind}), {trained:,} parameters"]
    known = _counted(plan) if stage.source.kind != "cached" else _cached(plan)
    if known is None:
        lines += [_UNKNOWN, *_steps_line(stage.steps, stage)]
    else:
        text, visual, how = known
        held, share = round((text + visual) * stage.held_out), 1 - stage.held_out
        kinds = np.repeat([-1, 1], [round(text * share), round(visual * share)])
        steps = stage.steps or steps_per_epoch(len(order(stage, kinds, 0)), stage.batch_size) * (stage.epochs or 0)
        lines.append(f"  samples {text + visual:,} ({how}), {held:,} of them held out; {visual:,} with pictures")
        lines += _steps_line(steps, stage)
    if stage.source.kind == "online":
        lines.append("  states are computed for each batch: the target runs in every step, nothing is kept")
    elif stage.source.kind == "cached_on_first_epoch":
        lines += describe_states(plan)
    else:
        lines.append("  states are read from shards")
    keep = stage.checkpoints.keep
    if by_muon := sum(shape.numel() for shape in muon_shapes(stage, config, recipe)):
        lines.insert(1, f"  {by_muon:,} of them by Muon, the others by AdamW")
    disk = keep * (8 * trained + 4 * total - 4 * by_muon) + 4 * total
    return [*lines, f"  disk about {disk / _GIB:.1f} GiB ({keep} checkpoints and the result)"]


def head_length(plan: Planned) -> int | None:
    """Most ids of a head's samples: of its data, or of the longest that its caches hold; None: nobody says."""
    if plan.stage.data is not None:
        return plan.stage.data.max_length
    return max((cache.stage.data.max_length for cache in _caches(plan)), default=None)


def _caches(plan: Planned) -> list[Planned]:
    """The stages whose states it reads."""
    return [plan.earlier[maker] for thing, maker in plan.inputs.items() if thing.split("/")[0] == "states"]


def _cached(plan: Planned) -> tuple[int, int, str] | None:
    """`_counted` of what the caches hold that a stage reads."""
    expected = plan.stage.expected
    if expected is not None:
        return (0, expected.samples, "declared") if expected.visual_tokens else (expected.samples, 0, "declared")
    caches = _caches(plan) if plan.stage.source.path is None else []
    known = [part for cache in caches if (part := _counted(cache)) is not None]
    if len(known) < len(caches) or not known:
        return None
    return sum(text for text, _, _ in known), sum(visual for _, visual, _ in known), known[0][2]


def _counted(plan: Planned) -> tuple[int, int, str] | None:
    """A stage's samples without pictures and with, and how they are known; None: not at all."""
    files = on_disk(plan.stage)
    number, how = samples(plan, files)
    if number is None:
        return None
    if files is not None:
        visual = round(float(((files.images > 0) | (files.clips > 0)).mean()) * number) if number else 0
    elif how == "declared":
        visual = number if plan.stage.expected.visual_tokens else 0
    else:
        visual = number - (generated(plan, without_pictures=True) or 0)
    return number - visual, visual, how


# Drafters of image generators, and the models of their demo.


def describe_image_model(plan: Planned) -> list[str]:
    """A stage of an image generator's recipe."""
    stage, recipe = plan.stage, plan.recipe
    lines = [f"  trains the {stage.model}"]
    if stage.model == "drafter":
        config = stage.drafter or recipe.drafter
        assert config is not None
        trained = drafter_parameters(config, recipe)
        lines = [f"  trains the head, {trained:,} parameters"]
    declared = stage.expected.samples if stage.expected else None
    if declared is not None:
        usable = round(declared * (1 - stage.data.held_out))
        lines.append(f"  samples {declared:,} (declared), {declared - usable:,} of them held out")
        lines += _steps_line(stage.num_steps(usable), stage)
    elif stage.steps:
        lines.append(f"  steps {stage.steps:,} at batch {stage.batch_size}")
    return lines
