"""Stage kind `train`: train a drafter, or the demo's target, on conversations. One path for both."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import model_validator

from ...core import ranks
from ...core.errors import UserError
from ...data.collate import ConversationCollate
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData, ConversationDataset
from ...data.loader import Loader, steps_per_epoch
from ...data.processor import Processor
from ...models.drafters.lvlm import build_drafter, load_drafter, save_llava
from ...models.llava import LlavaTraining, Part
from ...models.lora import LoraConfig, merge_adapters
from ...models.targets.load import build_target, load_llava, target_config
from ..context import Context
from ..engine import Engine, init_distributed
from ..fit import SCRATCH, FitSettings, Validate, fit, seed_all
from ..preflight import preflight
from ..validate import ValidationConfig, validate


class TrainStage(FitSettings):
    kind: Literal["train"]
    # Whose weights are trained; everything else is frozen.
    model: Literal["drafter", "target"] = "drafter"
    trainable: list[Part]
    format: PromptFormat = PromptFormat()
    data: ConversationData
    # Batches of one modality (LLaVA's finetuning): faster, and ranks stay even.
    group_by_modality: bool = False
    gradient_checkpointing: bool = False
    # Train low-rank adapters in place of the language model's own weights.
    lora: LoraConfig | None = None
    validation: ValidationConfig | None = None

    @model_validator(mode="after")
    def _known_parts(self) -> TrainStage:
        if self.lora is not None and "language_model" not in self.trainable:
            raise ValueError("lora is given, and trainable does not name language_model")
        unknown = set(self.optim.lr_by_part) - set(self.trainable)
        if unknown:
            raise ValueError(f"optim.lr_by_part names {sorted(unknown)}, which trainable does not")
        return self

    def makes(self) -> set[str]:
        return {self.model}

    def needs(self) -> dict[str, str | None]:
        wanted: dict[str, str | None] = {"processor": None}
        if self.data.from_stage is not None:
            wanted["data"] = self.data.from_stage
        if self.validation is not None and self.validation.data.from_stage not in (None, self.data.from_stage):
            raise ValueError("validation.data and data come from two stages")
        if self.model == "drafter":
            wanted["target"] = None
        if self.from_stage not in (None, SCRATCH):
            wanted[self.model] = self.from_stage
        return wanted


def run(stage: TrainStage, context: Context) -> None:
    init_distributed()
    seed = context.seed if stage.seed is None else stage.seed
    seed_all(seed)
    processor = context.processor()
    dataset = ConversationDataset(
        stage.data,
        stage.format,
        processor,
        files=data_files(stage.data, context),
        skipped_log=context.folder / "skipped.jsonl",
        cache=context.folder / "cache",
    )
    llava = _start_weights(stage, context, processor, seed)
    check_positions(llava.config, stage)
    module = LlavaTraining(llava, stage.trainable, gradient_checkpointing=stage.gradient_checkpointing, lora=stage.lora)
    total = stage.num_steps(len(dataset))
    preflight(dataset, module, processor, folder=context.folder, say=context.say)
    make_loader = functools.partial(_loader, stage, dataset, processor, seed, total)
    validation = stage.validation
    engine = fit(
        stage,
        context,
        module,
        make_loader,
        total=total,
        validate=_validation(validation, stage, context, processor) if validation else None,
        validate_every=validation.every if validation else None,
    )
    _save(stage, context, engine, processor, total, seed)


def _validation(settings: ValidationConfig, stage: TrainStage, context: Context, processor: Processor) -> Validate:
    """What the loop calls to score held-out records; the frozen target is loaded once, and only here."""
    dataset = ConversationDataset(
        settings.data,
        stage.format,
        processor,
        files=data_files(settings.data, context),
        skipped_log=context.folder / "skipped-validation.jsonl",
        cache=context.folder / "cache",
    )
    target: Any = None
    if stage.model == "drafter" and settings.against_target:
        config = context.target
        source = context.target_source()
        target = load_llava(
            source,
            revision=config.revision,
            dtype=getattr(torch, config.dtype),
            device_map=config.device_map,
            key="target.path",
        )
        target.requires_grad_(False).eval()
        if config.device_map is None:
            target.to(context.device())
    batch_size = settings.micro_batch_size * ranks.world_size()
    loader = Loader(
        dataset,
        seed=0,
        batch_size=batch_size,
        micro_batch_size=settings.micro_batch_size,
        total_steps=steps_per_epoch(len(dataset), batch_size),
        collate=ConversationCollate(processor.pad_id, processor.image_size),
        rank=ranks.rank(),
        world_size=ranks.world_size(),
    )
    return lambda engine, step: validate(engine, loader, target)


def data_files(data: ConversationData, context: Context) -> list[Path]:
    """Files on disk, or splits of the world that an earlier stage wrote."""
    names = [data.path] if isinstance(data.path, str) else data.path
    if data.from_stage is None:
        return [Path(name) for name in names]
    return [context.inputs["data"] / "world" / f"{name}.json" for name in names]


def check_positions(config: Any, stage: TrainStage) -> None:
    """Samples longer than the language model has positions would be learned wrong, silently."""
    positions = config.text_config.max_position_embeddings
    if stage.data.max_length > positions:
        raise UserError(
            f"data.max_length is {stage.data.max_length} and the language model has {positions} positions",
            cure=f"set data.max_length to {positions} or less, or use a model with more positions",
        )


def _start_weights(stage: TrainStage, context: Context, processor: Processor, seed: int) -> Any:
    """The model as this stage finds it: an earlier stage's result, or assembled from the recipe."""
    made = context.inputs.get(stage.model)
    if made is not None:
        if stage.model == "drafter":
            return load_drafter(made, tokenizer_hash=processor.tokenizer_hash, dtype=torch.float32)
        return load_llava(made, revision=None, dtype=torch.float32, key="target")
    if stage.model == "target":
        return build_target(context.target, context.token_ids(processor, len(processor.tokenizer)))
    assert context.drafter is not None
    if context.drafter.vision_tower == "target":
        target: Any = load_llava(context.target_source(), revision=None, dtype=torch.float32, key="target.path")
    elif (folder := context.inputs.get("target")) is not None:
        target = load_llava(folder, revision=None, dtype=torch.float32, key="target").config
    else:
        target = target_config(context.target, None, network=True)
    ids = context.token_ids(processor, getattr(target, "config", target).text_config.vocab_size)
    return build_drafter(context.drafter, target, ids, seed=seed)


def _loader(
    stage: TrainStage,
    dataset: ConversationDataset,
    processor: Processor,
    seed: int,
    total: int,
    start_step: int,
) -> Loader:
    return Loader(
        dataset,
        seed=seed,
        batch_size=stage.batch_size,
        micro_batch_size=stage.micro,
        total_steps=total,
        collate=ConversationCollate(processor.pad_id, processor.image_size),
        grouped=stage.group_by_modality,
        rank=ranks.rank(),
        world_size=ranks.world_size(),
        start_step=start_step,
        num_workers=stage.num_workers,
    )


def _save(stage: TrainStage, context: Context, engine: Engine, processor: Processor, total: int, seed: int) -> None:
    """The result: a directory that transformers loads, written by rank 0."""
    manifest = {
        "model": stage.model,
        "target": str(context.target.path or "inline"),
        "tokenizer_hash": processor.tokenizer_hash,
        "format": stage.format.model_dump(),
        "training": {"stage": context.name, "steps": total, "seed": seed, "fingerprint": context.fingerprint},
        "command": context.command,
    }
    with engine.full_weights():
        if ranks.is_main():
            module = engine.module
            assert isinstance(module, LlavaTraining)
            merge_adapters(module.llava)
            save_llava(module.llava, context.folder, manifest)
            processor.save(context.folder)
    ranks.barrier()
