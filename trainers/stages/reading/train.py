"""Stage kind `train` for heads that read a language model's states (Sparrow, MSD, ViSpec, HiViS, EAGLE, EAGLE-3).

A hard switch from text to pictures (Sparrow, ViSpec) is two stages, each from the one before; MSD's rising share of
pictures is `visual_share: linear` over data that has both kinds.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from ....core import ranks
from ....core.errors import UserError
from ....data.buckets import BucketedOrder, Order, RisingVisualOrder
from ....data.conversations import PromptFormat
from ....data.dataset import ConversationData
from ....data.loader import Collate, Loader, Samples, steps_per_epoch
from ....data.processor import Processor
from ....data.sources import AnswersConfig
from ....data.states.reader import StatesReader
from ....data.states.samples import SeededCollate, split
from ....models.drafters.reading import ReadingConfig, ReadingObjective, likeliest_ids
from ...answers.texts import check_fit
from ...context import Context
from ...describe.train import describe_head
from ...engine import Engine, init_distributed
from ...fit import SCRATCH, FitSettings, Validate, fit, seed_all
from ..base import Planned
from ..best import held_out_scores
from ..visual.train import ValidationSettings
from .build import (
    Builder,
    StatesStore,
    check_answers,
    count_samples,
    identity_of,
    open_samples,
    open_target,
    wanted_states,
)
from .cache import SHARDS, sample_needs
from .heads import ReadingHeads, TextDecodingCheck
from .sources import Cached, CachedStates, FirstEpoch, FirstEpochStates, Online, OnlineStates, States, StatesSource


class ReadingTrainStage(FitSettings):
    kind: Literal["train"]
    model: Literal["drafter"] = "drafter"
    # Another head than the recipe's, so that two of them can be trained beside each other; it then needs `from` (a
    # stage that trained such a head, or scratch), since the latest stage trained another.
    drafter: ReadingConfig | None = None
    # Of the samples, and of the prompts that `decoding` measures; a cache must have been made with it.
    format: PromptFormat = PromptFormat()
    # Null with source: cached, whose shards hold the samples.
    data: ConversationData | None = None
    # Whose answers to these records are learned; null: the records' own.
    answers: AnswersConfig | None = None
    # Where the target's states come from.
    source: StatesSource = OnlineStates()
    # Terms of the loss in this stage; null: the drafter's own.
    objective: ReadingObjective | None = None
    # Share of the samples that is kept for validation, by a hash of their names.
    held_out: float = Field(0.0, ge=0, lt=1)
    validation: ValidationSettings | None = None
    # A small decoding run with the head as it is.
    decoding: TextDecodingCheck | None = None
    # Which weights become the stage's result: the last, or those with the best held-out accuracy or measured tau.
    select: Literal["last", "top1", "top3", "tau"] = "last"
    # linear: text alone first, then a share with pictures that rises to all of them (MSD); null: as they come.
    visual_share: Literal["linear"] | None = None
    # Epochs of text alone before that; null: half of them.
    text_epochs: int | None = Field(None, ge=0)
    # Batches that are sorted by length together, so that little is padded; 1: no sorting.
    window: int = Field(50, ge=1)

    @model_validator(mode="after")
    def _whole(self) -> ReadingTrainStage:
        check_answers(self.answers)
        if self.drafter is not None and self.from_stage is None:
            raise ValueError("a drafter of its own starts from: scratch, or from a stage that trained such a head")
        if (self.data is None) != (self.source.kind == "cached"):
            raise ValueError("give data, or source: cached, whose shards hold the samples")
        if self.answers is not None and self.data is None:
            raise ValueError("answers belong to data; those of cached states are the cache stage's")
        if self.visual_share is not None:
            if self.epochs is None or self.epochs <= self.num_text_epochs:
                raise ValueError("visual_share: linear needs epochs, more of them than text_epochs")
            if self.source.kind == "cached_on_first_epoch":
                raise ValueError(
                    "visual_share: linear does not see every sample in its first epoch; use source: cached"
                )
        return self

    @model_validator(mode="after")
    def _measured(self) -> ReadingTrainStage:
        if self.select in ("top1", "top3") and self.validation is None:
            raise ValueError(f"select: {self.select} needs validation")
        if self.select == "tau" and self.decoding is None:
            raise ValueError("select: tau needs decoding")
        if self.validation is not None and not self.held_out:
            raise ValueError("validation needs held_out")
        if self.decoding and self.validation and self.decoding.every % self.validation.every:
            raise ValueError("decoding.every must be a multiple of validation.every")
        return self

    @property
    def num_text_epochs(self) -> int:
        return (self.epochs or 0) // 2 if self.text_epochs is None else self.text_epochs

    @property
    def reads_tables(self) -> bool:
        """Of the target its embedding and LM head alone: it runs nowhere in this stage."""
        return isinstance(self.source, CachedStates) and self.decoding is None

    def makes(self) -> set[str]:
        return {"drafter"}

    def needs(self) -> dict[str, str | None]:
        wanted = sample_needs(self.data, self.answers) | {"target": None, "processor": None}
        if isinstance(self.source, CachedStates):
            for name in self.source.stages:
                wanted["states" if name is None else f"states/{name}"] = name
        if self.decoding is not None and self.decoding.data.from_stage is not None:
            if wanted.get("data", self.decoding.data.from_stage) != self.decoding.data.from_stage:
                raise ValueError("decoding.data and data come from two stages")
            wanted["data"] = self.decoding.data.from_stage
        if self.from_stage not in (None, SCRATCH):
            wanted["drafter"] = self.from_stage
        return wanted

    def run(self, context: Context) -> None:
        run(self, context)

    def describe(self, plan: Planned) -> list[str]:
        return describe_head(plan, training_order)


def run(stage: ReadingTrainStage, context: Context) -> None:
    init_distributed()
    context = context.with_drafter(stage.drafter)
    seed = context.seed if stage.seed is None else stage.seed
    seed_all(seed)
    processor = context.processor()
    target = open_target(context, processor, tables_only=stage.reads_tables)
    states = open_states(stage, context, processor, target, seed)
    train, held_out = split(states.draws, stage.held_out)
    if not len(train) or (stage.validation is not None and not len(held_out)):
        raise UserError("no sample to train on, or none held out", cure="check the data and held_out")
    order = training_order(stage, states.lengths[train], seed)
    total = stage.steps or steps_per_epoch(len(order), stage.batch_size) * (stage.epochs or 0)
    context.say(f"{len(train):,} samples, {len(held_out):,} held out; {total:,} steps of {stage.batch_size}")
    heads = ReadingHeads(stage, context, processor, target, _draft_ids(context, states, train, target))

    def make_loader(samples: Samples, collate: Collate, first: int, last: int) -> Loader:
        return Loader(
            samples, seed=seed, batch_size=stage.batch_size, micro_batch_size=stage.micro, total_steps=last,
            collate=collate, rank=ranks.rank(), world_size=ranks.world_size(), start_step=first,
            num_workers=stage.num_workers, order=order,
        )  # fmt: skip

    validate = _validation(stage, states, held_out, heads, total)
    engine = fit(
        stage,
        context,
        heads.module,
        lambda first: states.steps(train, make_loader, first, total, trains=True),  # type: ignore[arg-type,return-value]
        total=total,
        validate=validate,
        validate_every=(stage.validation or stage.decoding).every if validate else None,  # type: ignore[union-attr]
    )
    heads.finish(engine, total, seed)


def open_states(stage: ReadingTrainStage, context: Context, processor: Processor, target: Any, seed: int) -> States:
    """The stage's source, whose states are checked to be this target's."""
    wanted = wanted_states(context, target.config)
    source = stage.source
    if isinstance(source, CachedStates):
        expected = identity_of(context, processor, stage.format, None, wanted, None)
        made = [context.inputs["states" if n is None else f"states/{n}"] / SHARDS for n in source.stages]
        reader = StatesReader([*made, *source.folders], expected=expected, accept=source.accept)
        return Cached(reader, seed)
    assert stage.data is not None
    samples = open_samples(stage.data, stage.format, stage.answers, context, processor)
    check_fit(context, samples.dataset, target.decoder, as_cut=True)
    builder = Builder(
        samples, count_samples(samples, context), target, wanted,
        source.states if isinstance(source, FirstEpochStates) else StatesStore(),
        context.folder / SHARDS, SeededCollate(processor.pad_id, processor.image_size, seed), stage.micro,
    )  # fmt: skip
    if not isinstance(source, FirstEpochStates):
        return Online(builder)
    measured = ranks.agree(builder.measure() if ranks.is_main() else None)
    known = identity_of(context, processor, stage.format, stage.data, wanted, source.states.dtype)
    return FirstEpoch(builder, known, measured, context.say)


def training_order(stage: ReadingTrainStage, lengths: np.ndarray, seed: int) -> Order:
    """Which samples each epoch has, and when."""
    if stage.visual_share is None:
        return BucketedOrder(lengths, seed, stage.batch_size, stage.window)
    if not (lengths > 0).any() or not (lengths <= 0).any():
        raise UserError(
            "visual_share: linear needs samples with pictures and samples without",
            cure="give data of both kinds, or caches of both in source.from",
        )
    assert stage.epochs is not None
    return RisingVisualOrder(lengths, seed, stage.batch_size, stage.num_text_epochs, stage.epochs, stage.window)


def _validation(
    stage: ReadingTrainStage, states: States, held_out: np.ndarray, heads: ReadingHeads, total: int
) -> Validate | None:
    """Held-out loss and accuracies, and now and then tau in a real decoding loop."""
    settings, decoding = stage.validation, stage.decoding
    if settings is None and decoding is None:
        return None
    steps: Any = None
    if settings is not None:
        held_out = held_out[: settings.max_samples]
        batch_size = settings.micro_batch_size * ranks.world_size()
        order = BucketedOrder(states.lengths[held_out], 0, batch_size, stage.window)

        def make_loader(samples: Samples, collate: Collate, first: int, last: int) -> Loader:
            return Loader(
                samples, seed=0, batch_size=batch_size, micro_batch_size=settings.micro_batch_size, total_steps=last,
                collate=collate, rank=ranks.rank(), world_size=ranks.world_size(), start_step=first, order=order,
            )  # fmt: skip

        last = steps_per_epoch(len(held_out), batch_size)
        steps = functools.partial(states.steps, held_out, make_loader, 0, last, trains=False)

    def validate(engine: Engine, step: int) -> dict[str, Any]:
        found: dict[str, Any] = {} if steps is None else held_out_scores(engine, steps())
        if decoding is not None and (step % decoding.every == 0 or step == total):
            found |= heads.decode(engine)
        heads.keep_best(engine, found, step)
        return found

    return validate


def _draft_ids(context: Context, states: States, train: np.ndarray, target: Any) -> Tensor | None:
    """The ids of EAGLE-3's reduced vocabulary: those that the samples' supervised tokens have most often."""
    size = getattr(context.drafter, "draft_vocab_size", None)
    if size is None or "drafter" in context.inputs:
        return None
    counts = torch.zeros(len(target.embedding), dtype=torch.int64)
    for index in train[ranks.rank() :: ranks.world_size()].tolist():
        counts += torch.bincount(states.supervised_ids(index), minlength=len(counts))
    counts = sum(ranks.gather(counts), torch.zeros_like(counts))
    never = target.scores(target.embedding.new_zeros(1, target.embedding.shape[1]))[0].isneginf().cpu()
    return likeliest_ids(counts, size, never)
