"""Stage kind `train`: train a drafter, or the demo's target, on conversations. One path for both."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from ...core import ranks
from ...core.errors import UserError
from ...data.collate import ConversationCollate
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData, ConversationDataset
from ...data.loader import Loader, steps_per_epoch
from ...data.mixture import is_mixture
from ...data.processor import Processor
from ...data.sources import AnswersConfig
from ...models.distillation import CrossEntropyObjective, DistillObjective
from ...models.drafters.lvlm import build_drafter, load_drafter, save_llava
from ...models.drafters.made_for import tested_with
from ...models.llava import FAMILIES, LlavaTraining, Part
from ...models.lora import LoraConfig, merge_adapters
from ...models.targets.load import build_target, load_llava, target_config, target_weights
from ..context import Context
from ..describe.train import describe_lvlm, describe_target, positions_of
from ..engine import Engine, init_distributed
from ..fit import SCRATCH, FitSettings, Validate, fit, seed_all, training_loader
from ..positions import before_training
from ..preflight import preflight
from ..validate import ValidationConfig, validate
from .base import Planned
from .distill import frozen_target, held_target, other_pictures, training_data, training_module


class TrainStage(FitSettings):
    kind: Literal["train"]
    # Whose weights are trained; everything else is frozen. A captioner is a model like the drafter, for mode C.
    model: Literal["drafter", "target", "captioner"] = "drafter"
    trainable: list[Part]
    format: PromptFormat = PromptFormat()
    data: ConversationData
    # Whose answers to these records are learned; null: the records' own.
    answers: AnswersConfig | None = None
    objective: Annotated[CrossEntropyObjective | DistillObjective, Field(discriminator="kind")] = (
        CrossEntropyObjective()
    )
    # Positions of the language model from this stage on; null: as it has them. Rotary positions need no new weights:
    # more of them are learned from samples that are as long.
    positions: int | None = Field(None, ge=8)
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

    @model_validator(mode="after")
    def _fitting_answers(self) -> TrainStage:
        objective, answers = self.objective, self.answers or AnswersConfig(shares={"data": 1.0})
        distills = isinstance(objective, DistillObjective)
        if self.model != "drafter" and (distills or self.answers is not None):
            raise ValueError("objective: distill and answers are for a drafter's stage")
        if answers.share("draft") and (not isinstance(objective, DistillObjective) or objective.cross_entropy):
            raise ValueError(
                "answers that the draft writes need objective: distill without cross_entropy, which would teach it "
                "only to repeat itself"
            )
        if isinstance(objective, DistillObjective) and objective.probabilities == "kept":
            if answers.share("target") < 1:
                raise ValueError("probabilities: kept are of the target's answers: set answers.shares to {target: 1}")
            if objective.temperature != 1:
                raise ValueError("probabilities: kept were taken at temperature 1: set objective.temperature to 1")
        return self

    def makes(self) -> set[str]:
        return {self.model}

    def needs(self) -> dict[str, str | None]:
        wanted: dict[str, str | None] = {"processor": None}
        if self.data.from_stage is not None:
            wanted["data"] = self.data.from_stage
        if self.validation is not None and self.validation.data.from_stage not in (None, self.data.from_stage):
            raise ValueError("validation.data and data come from two stages")
        if self.answers is not None and self.answers.share("target") and self.answers.path is None:
            wanted["answers"] = self.answers.from_stage
        if self.model != "target":
            wanted["target"] = None
        if self.from_stage not in (None, SCRATCH):
            wanted[self.model] = self.from_stage
        return wanted

    def run(self, context: Context) -> None:
        run(self, context)

    def describe(self, plan: Planned) -> list[str]:
        check_positions(positions_of(plan), self)
        return describe_lvlm(plan)


class TargetTrainStage(TrainStage):
    """The same where no other model can be trained so: the drafters of a recipe for heads are no LVLMs."""

    model: Literal["target"]

    def describe(self, plan: Planned) -> list[str]:
        return describe_target(plan)


def run(stage: TrainStage, context: Context) -> None:
    init_distributed()
    seed = context.seed if stage.seed is None else stage.seed
    seed_all(seed)
    processor = context.processor_of(stage.model)
    dataset = ConversationDataset(
        stage.data,
        stage.format,
        processor,
        files=data_files(stage.data, context),
        skipped_log=context.folder / "skipped.jsonl",
        cache=context.folder / "cache",
    )
    llava = _start_weights(stage, context, processor, seed)
    positions = _set_positions(llava, stage)
    check_positions(positions, stage)
    module = training_module(stage, context, llava, processor)
    data = training_data(stage, context, dataset, processor, seed)
    total = stage.num_steps(len(dataset))
    if ranks.is_main():
        before_training(dataset, positions, context.say, prompts=stage.answers is not None)
    preflight(data.shown, module, processor, folder=context.folder, say=context.say)
    make_loader = functools.partial(
        training_loader, stage, data.samples, data.collate, seed=seed, total=total, grouped=stage.group_by_modality
    )
    validation = stage.validation
    engine = fit(
        stage,
        context,
        module,
        make_loader,
        total=total,
        validate=_validation(validation, stage, context, processor, module) if validation else None,
        validate_every=validation.every if validation else None,
        write=data.writer,
    )
    _save(stage, context, engine, processor, total, seed)
    if ranks.is_main() and (listed := dataset.num_listed()):
        context.say(f"{listed:,} records were left out or changed: {dataset.skipped_log}")


def _validation(
    settings: ValidationConfig, stage: TrainStage, context: Context, processor: Processor, module: LlavaTraining
) -> Validate:
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
        if (difference := other_pictures(context, settings.data)) is not None:
            raise UserError(
                f"validation runs the target on the draft's batches, and {difference}",
                where=f"key stages.{context.name}.validation",
                cure="set validation.against_target: false",
            )
        target = held_target(module) or frozen_target(context)
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
    """Files on disk, or splits and mixtures of the world that an earlier stage wrote."""
    names = [data.path] if isinstance(data.path, str) else data.path
    if data.from_stage is None:
        return [Path(name) for name in names]
    world = context.inputs["data"] / "world"
    return [world / (name if is_mixture(Path(name)) else f"{name}.json") for name in names]


def _set_positions(llava: Any, stage: TrainStage) -> int:
    """The language model's positions in this stage."""
    text = llava.config.get_text_config()
    if stage.positions is not None:
        text.max_position_embeddings = stage.positions
        decoder = getattr(llava.model, "language_model", llava.model)
        assert decoder.config is text, "one config, so that what is saved is what was trained"
    return text.max_position_embeddings


def check_positions(positions: int, stage: TrainStage) -> None:
    """Samples longer than the language model has positions would be learned wrong, silently."""
    if stage.data.max_length > positions:
        raise UserError(
            f"data.max_length is {stage.data.max_length} and the language model has {positions} positions",
            cure=f"set data.max_length to {positions} or less, or give the model more: drafter.rope_scaling, or the "
            "stage's positions",
        )


def _start_weights(stage: TrainStage, context: Context, processor: Processor, seed: int) -> Any:
    """The model as this stage finds it: an earlier stage's result, or assembled from the recipe."""
    made = context.inputs.get(stage.model)
    if made is not None:
        if stage.model != "target":
            return load_drafter(made, tokenizer_hash=processor.tokenizer_hash, dtype=torch.float32)
        return target_weights(context.target, made, dtype=torch.float32)
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


def _save(stage: TrainStage, context: Context, engine: Engine, processor: Processor, total: int, seed: int) -> None:
    """The result: a directory that transformers loads, written by rank 0."""
    manifest = {
        "model": stage.model,
        "target": str(context.target.path or "inline"),
        "target_revision": context.target.revision,
        "tokenizer_hash": processor.tokenizer_hash,
        # Its own eyes' projected features stand at visual places, and every token has one position.
        "reads": {"visual_embedding": "projected", "positions": "flat"},
        "tested_with": tested_with(),
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
            family = module.llava.config.model_type
            (processor.of_family(family) if family in FAMILIES else processor).save(context.folder)
    ranks.barrier()
