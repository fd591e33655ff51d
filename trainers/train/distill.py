"""What a `train` stage needs beside its data: the frozen target, the objective, and whose answers are learned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...core.batch import Request
from ...core.errors import UserError
from ...core.section import torch_dtype
from ...data.collate import ConversationCollate
from ...data.conversations import end_ids
from ...data.dataset import ConversationData, ConversationDataset
from ...data.families.processor import Processor
from ...data.loader import Collate, Samples, StepBatches
from ...data.sources import SHARDS, AnswerCollate, AnsweredSamples, Answers
from ...models.decoding.batched import write_answers
from ...models.decoding.decoder import CachedDecoder
from ...models.decoding.warp import Warp
from ...models.drafters.distillation import CrossEntropyObjective, DistillObjective, DistillTraining, Teacher
from ...models.parts import placeholder_ids
from ...models.stored import resolved_dtype
from ...models.targets.load import target_weights
from ...models.targets.table import family_of, language_section, training_of
from ...models.training import ModelTraining
from ..run.context import Context
from .engine import Engine
from .settings import RecordsSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def frozen_target(context: Context) -> PreTrainedModel:
    """The target's model, whole on this rank (or spread by its device map), in evaluation, without gradients."""
    config = language_section(context.target)
    target = target_weights(
        config,
        context.target_source(),
        dtype=torch_dtype(resolved_dtype(config, context.target_source(), context.device(), key="target")),
        device=context.device(),
        device_map=config.device_map,
        offload=config.offload,
        attn_implementation=config.attn_implementation,
        key="target.path",
    )
    return target.requires_grad_(False).eval()


def training_module(
    stage: RecordsSettings, context: Context, model: PreTrainedModel, processor: Processor
) -> ModelTraining:
    """The module that the engine trains, with the target beside it where the objective asks for one."""
    settings = {"gradient_checkpointing": stage.gradient_checkpointing, "lora": stage.lora}
    objective: CrossEntropyObjective | DistillObjective = stage.objective or CrossEntropyObjective()
    if isinstance(objective, CrossEntropyObjective):
        resume = dict(context.target).get("resume", "max_plus_one")
        return training_of(model, stage.trainable, resume=resume, **settings)
    target = None
    if objective.probabilities == "online":
        if (difference := other_pictures(context, stage.data)) is not None:
            raise _not_one_batch(difference)
        target = Teacher(frozen_target(context))
        _check_shares(model.config, target.model.config)
    banned = torch.zeros(model.config.text_config.vocab_size, dtype=torch.bool)
    banned[processor.num_token_ids :] = True
    banned[[processor.image_token_id, *placeholder_ids(model.config)]] = True
    return DistillTraining(model, stage.trainable, objective=objective, teacher=target, banned=banned, **settings)


def other_pictures(context: Context, data: ConversationData) -> str | None:
    """Why target and draft cannot read one batch of `data`, as far as pictures are concerned; None: they can."""
    if context.drafter_has_own_image_processor:
        return "the drafter has an image processor of its own"
    in_tiles = language_section(context.target).reads_tiles
    if in_tiles not in (None, data.aspect.startswith("anyres")):
        shown = "tiles" if in_tiles else "single tiles"
        return f"the target reads pictures in {shown} and the drafter aspect: {data.aspect}"
    return None


def _check_shares(draft: PreTrainedConfig, target: PreTrainedConfig) -> None:
    """Online, the target reads the draft's own batch."""
    pairs = {
        "text_config.vocab_size": (draft.text_config.vocab_size, target.text_config.vocab_size),
        "vision_config.image_size": (draft.vision_config.image_size, target.vision_config.image_size),
        "vision_config.patch_size": (draft.vision_config.patch_size, target.vision_config.patch_size),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise _not_one_batch(f"the drafter's {name} is {ours}, the target's {theirs}")


def _not_one_batch(difference: str) -> UserError:
    return UserError(
        f"{difference}: it cannot read one batch with the target",
        key="objective",
        hint="distill a draft of the target's vocabulary and pictures; or let it learn the target's answers by "
        "cross-entropy, or from kept log-probabilities",
    )


@dataclass(frozen=True)
class TrainingData:
    """What the loader of a stage reads, and what is written while it trains."""

    samples: Samples
    collate: Collate
    shown: Any  # a sequence of encoded samples, as the first epoch has them
    writer: DraftWriter | None


def training_data(
    stage: RecordsSettings, context: Context, dataset: ConversationDataset, processor: Processor, seed: int
) -> TrainingData:
    """The records themselves, or their prompts with answers by source."""
    if stage.answers is None:
        return TrainingData(dataset, ConversationCollate(processor.pad_id, processor.image_size), dataset, None)
    answers = None
    if stage.answers.share("target"):
        folder = Path(stage.answers.path) if stage.answers.path else context.inputs["answers"] / SHARDS
        answers = Answers(folder, dataset)
    num_kept = 0
    objective = stage.objective
    if objective is not None and objective.kind == "distill" and objective.probabilities == "kept":
        assert answers is not None, "see TrainStage"
        num_kept = answers.num_kept
        if not num_kept:
            raise UserError(
                "the answers were written without log-probabilities", where=str(answers.folder),
                hint="set keep_logprobs in the regenerate stage, or objective.probabilities: online",
            )  # fmt: skip
    samples = AnsweredSamples(dataset, stage.answers, answers, seed=seed)
    writer = None
    if stage.answers.share("draft"):
        writer = DraftWriter(samples, processor, end_ids(processor, stage.format), seed)
    collate = AnswerCollate(samples, processor.pad_id, processor.image_size, num_kept)
    return TrainingData(samples, collate, _FirstEpoch(samples), writer)


class _FirstEpoch:
    def __init__(self, samples: AnsweredSamples):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples.row(index, 0).sample


class DraftWriter:
    """Lets the draft answer, with its weights as they stand, what a step's batches leave open.

    An answer depends on the weights and on (seed, step, sample) alone.
    """

    def __init__(self, samples: AnsweredSamples, processor: Processor, ends: Sequence[int], seed: int):
        self.samples, self.processor, self.ends, self.seed = samples, processor, ends, seed

    def __call__(self, engine: Engine, batches: StepBatches) -> StepBatches:
        module: Any = engine.module
        try:
            decoder = family_of(module.model.config).decoder(
                module.model, num_token_ids=self.processor.num_token_ids, never=(self.processor.image_token_id,)
            )
            micro = [
                batch.filled(self._answers(decoder, batch.requests, batches.step) if batch.requests else [])
                for batch in batches.micro
            ]
        finally:
            module.train()  # the decoder puts the model into evaluation mode
        return replace(batches, micro=micro)

    def _answers(self, decoder: CachedDecoder, requests: Sequence[Request], step: int) -> list[list[int]]:
        settings = self.samples.config.draft
        written = write_answers(
            decoder,
            requests,
            Warp(settings.temperature, settings.top_k, settings.top_p),
            limits=[self.samples.limit(request) for request in requests],
            seeds=[random.Random(f"draft/{self.seed}/{step}/{r.name}").getrandbits(63) for r in requests],
            eos_ids=self.ends,
        )
        return [answer.ids for answer in written]
