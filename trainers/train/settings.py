"""Settings of `train` stages: what each way of training reads, and what of it goes together.

What a stage takes, makes and says of itself is in `trainers/stages/train.py`; the work in `on_records.py`,
`on_states.py` and `on_codes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from ...core.errors import Refused
from ...core.fields import MOST_ANSWER, Temperature, TopK, TopP
from ...core.section import Section
from ...data.captioned.prompts import PromptSource
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData
from ...data.order import PackingConfig, check_lengths
from ...data.shards.codes import ShardData
from ...data.sources import AnswersConfig, LearnsRecords
from ...eval.policies import TreeConfig
from ...models.drafters.base import DrafterConfig, HeadObjective
from ...models.drafters.distillation import CrossEntropyObjective, DistillObjective
from ...models.parts import Part
from ...models.targets.drawing import PerceptualConfig
from ...models.training import LoraConfig
from ..run.stage import Planned
from ..serve.states_builder import check_answers
from ..serve.target_engine import TargetEngine
from .fit import TrainSettings
from .states_source import OnlineStates, StatesSource
from .validate import HeadValidation, RecordsValidation


class DecodingCheck(Section):
    """A real decoding run on a few requests: tau."""

    # Optimizer steps between two of them (a multiple of validation.every); the last step always has one.
    every: int = Field(ge=1)
    tree: TreeConfig
    # Null: 0 for answers; 0 and 1 for images.
    temperatures: list[Temperature] | None = Field(None, min_length=1)
    top_k: TopK = 0
    top_p: TopP = 1.0


class TextCheck(DecodingCheck):
    """The check of a language model's drafter."""

    # Records, each up to its last answer; max_samples keeps them few.
    data: ConversationData
    # Tokens of an answer; null: 64.
    max_new_tokens: int | None = Field(None, ge=1, le=MOST_ANSWER)

    @model_validator(mode="after")
    def _of_text(self) -> TextCheck:
        if not self.tree.for_text:
            problem = f"{self.tree.kind} follows the rows of an image, and this target writes text"
            raise Refused("tree", problem, "use a chain, static, dynamic or sage tree")
        return self


class PicturesCheck(DecodingCheck):
    """The check of an image generator's drafter, which also keeps the pictures that come out."""

    prompts: PromptSource


class HeadTrainSettings(TrainSettings):
    """What is trained with the target's states, of records or of codes."""

    held_out_key: ClassVar[str]  # key of the share that validation needs

    validation: HeadValidation | None = None
    # A small decoding run with the head as it is.
    decoding: DecodingCheck | None = None
    # The draft's own LM head. from_target: from scratch it begins with the target's rows of its ids, as others than
    # EAGLE-3's and P-EAGLE's do anyway; frozen: so, and it stays, as in speculators' trainings, so that steps are
    # cheaper. Null: as the drafter begins it, and it learns.
    lm_head: Literal["from_target", "frozen"] | None = Field(None, exclude_if=lambda value: value is None)
    # Which weights become the stage's result: the last, or those with the best held-out accuracy or measured tau. Each
    # best one is kept beside it as well.
    select: Literal["last", "top1", "top3", "tau"] = "last"

    @property
    def checked_every(self) -> int | None:
        """Optimizer steps between two validations or decoding checks."""
        settings = self.validation or self.decoding
        return None if settings is None else settings.every

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if self.model != "drafter" and (self.validation or self.decoding or self.select != "last"):
            raise ValueError("validation, decoding and select are for heads (model: drafter)")
        if self.select in ("top1", "top3") and self.validation is None:
            raise ValueError(f"select: {self.select} needs validation")
        if self.select == "tau" and self.decoding is None:
            raise ValueError("select: tau needs decoding")
        if self.decoding and self.validation and self.decoding.every % self.validation.every:
            raise ValueError("decoding.every must be a multiple of validation.every")
        if self.validation is not None and not attrgetter(self.held_out_key)(self):
            raise Refused(
                "validation", f"validation needs {self.held_out_key}", "hold out a share of the samples: 0.05"
            )
        return self


class StatesSettings(LearnsRecords, HeadTrainSettings):
    """Heads of language models."""

    held_out_key: ClassVar[str] = "held_out"

    model: Literal["drafter"] = "drafter"
    # Null with source: cached, whose shards hold the samples.
    data: ConversationData | None = None
    # Of the records, and of the prompts that `decoding` measures; a cache must have been made with it.
    format: PromptFormat = PromptFormat()
    # Whose answers to these records are learned; null: the records' own.
    answers: AnswersConfig | None = None
    # Where the target's states come from.
    source: StatesSource = OnlineStates()
    # Terms of the loss; null: the drafter's own.
    objective: HeadObjective | None = None
    # Share of the samples that is kept for validation, by a hash of their names.
    held_out: float = Field(0.0, ge=0, lt=1)
    decoding: TextCheck | None = None
    # linear: text alone first, then a share with pictures that rises to all of them (MSD); null: as they come.
    visual_share: Literal["linear"] | None = None
    # Epochs of text alone before that; null: half of them.
    text_epochs: int | None = Field(None, ge=0)
    # Batches that are sorted by length together, so that little is padded; 1: no sorting; null: 50.
    window: int | None = Field(None, ge=1)
    # Samples of a step one after another in rows without padding, in place of micro_batch_size padded ones; null: none.
    # Loss and gradients are those of padded batches.
    packing: PackingConfig | None = None

    @property
    def num_text_epochs(self) -> int:
        """`text_epochs`; unset, half of the epochs, rounded down."""
        return (self.epochs or 0) // 2 if self.text_epochs is None else self.text_epochs

    @property
    def reads_tables(self) -> bool:
        """Whether it loads the target's embedding and LM head alone: the target does not run in this process."""
        return (self.source.kind == "cached" or self.serving_engine is not None) and self.decoding is None

    @property
    def serving_engine(self) -> TargetEngine | None:
        """The engine that computes the states in a process of its own; None: none does."""
        return self.source.engine if self.source.kind == "online" and self.source.engine.is_served else None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.data is None) != (self.source.kind == "cached"):
            raise ValueError("give data, or source: cached, whose shards hold the samples")
        if self.answers is not None and self.data is None:
            raise ValueError("answers belong to data; those of cached states are the cache stage's")
        check_answers(self.answers)
        if self.visual_share is not None:
            if self.epochs is None or self.epochs <= self.num_text_epochs:
                raise ValueError("visual_share: linear needs epochs, more of them than text_epochs")
            if self.source.kind == "cached_on_first_epoch":
                raise ValueError(
                    "visual_share: linear does not see every sample in its first epoch; use source: cached"
                )
        _check_packing(self)
        if self.packing is not None and self.source.kind == "cached_on_first_epoch":
            problem = "the first epoch writes the states of batches, not of packed rows"
            raise Refused("packing", problem, "use source: online or cached")
        return self


class CodesSettings(HeadTrainSettings):
    """Heads of image generators, and the synthetic dataset's image tokenizer (vq), reader and generator."""

    held_out_key: ClassVar[str] = "data.held_out"

    # Whose weights are trained; everything else is frozen.
    model: Literal["drafter", "target", "vq", "reader"] = "drafter"
    data: ShardData
    decoding: PicturesCheck | None = None
    # Share of samples that lose their condition, drawn anew in each epoch; guidance needs both sides. Null: 0.1.
    condition_dropout: float | None = Field(None, ge=0, lt=1)
    # target: codes that it does not read, a share of each picture drawn between 0 and this one: what a picture's first
    # codes say, captions would teach in vain (word dropout, Bowman et al. 2016, section 3.1).
    code_dropout: float = Field(0.0, ge=0, le=1, exclude_if=lambda value: not value)
    # vq: forwards between two revivals of codes that no picture chooses, in the first 60% of the training; small
    # tokenizers keep a handful of codes otherwise. Writes weights in place: zero_stage 0 only.
    revive_every: int | None = Field(None, ge=1)
    # vq: a loss of how pictures look beside that of pixels, without which details blur; null: none.
    perceptual: PerceptualConfig | None = Field(None, exclude_if=lambda value: value is None)

    @property
    def trained(self) -> str:
        return "image tokenizer" if self.model == "vq" else self.model

    @property
    def is_small_net(self) -> bool:
        return self.revive_every is not None or self.model in ("vq", "reader")

    @model_validator(mode="after")
    def _of_its_model(self) -> Self:
        if self.revive_every and self.model != "vq":
            raise ValueError("revive_every is for image tokenizers (model: vq)")
        if self.code_dropout and self.model != "target":
            raise Refused("code_dropout", "is for image generators (model: target)", "leave it out")
        if self.perceptual and self.model != "vq":
            raise Refused("perceptual", "is for image tokenizers (model: vq)", "leave it out")
        if self.model != "drafter" and self.outside is not None:
            raise Refused("from.path", f"is a head's, and this stage trains the {self.model}", "give target.path")
        return self


class RecordsSettings(LearnsRecords, TrainSettings):
    """LLaVA-like models: draft LVLMs, a tiny target, a captioner."""

    # Whose weights are trained; everything else is frozen. A captioner is a model like a draft LVLM, for mode C.
    model: Literal["drafter", "target", "captioner"] = "drafter"
    # The parts that are trained; the others are frozen.
    trainable: list[Part]
    data: ConversationData
    format: PromptFormat = PromptFormat()
    # Whose answers to these records are learned; null: the records' own.
    answers: AnswersConfig | None = None
    # null: cross_entropy.
    objective: Annotated[CrossEntropyObjective | DistillObjective, Field(discriminator="kind")] | None = None
    validation: RecordsValidation | None = None
    # Positions of the language model from this stage on; null: as it has them. Rotary positions need no new weights:
    # more of them are learned from samples that are as long.
    positions: int | None = Field(None, ge=8)
    # Batches of one modality (LLaVA's finetuning): faster, and ranks stay even.
    group_by_modality: bool = False
    # Batches that are sorted by length together, so that little is padded; 1: no sorting; null: LLaVA's order. With
    # group_by_modality each batch has one modality, too. Samples are counted first, which costs their texts and the
    # heads of picture files, once.
    window: int | None = Field(None, ge=1)
    # Samples of a step one after another in rows without padding, in place of micro_batch_size padded ones; null: none.
    # Loss and gradients are those of padded batches. Samples are counted first.
    packing: PackingConfig | None = None
    gradient_checkpointing: bool = False
    # Train low-rank adapters in place of the language model's own weights.
    lora: LoraConfig | None = None

    @property
    def mixes_answers(self) -> bool:
        """Whether a sample's answer is another one in another epoch, so that nobody can say beforehand what it has."""
        shares = [] if self.answers is None else [self.answers.share("data"), self.answers.share("target")]
        return max(shares, default=1.0) < 1

    @property
    def counts_samples(self) -> bool:
        """Whether samples are counted beforehand: to sort or pack them, or to leave out what teaches nothing."""
        skips = "skip" in (self.data.on_error, self.data.over_length) or self.answers is not None
        return self.window is not None or self.packing is not None or (skips and not self.mixes_answers)

    @property
    def trained(self) -> str:
        return f"{self.model}: {', '.join(self.trainable)}"

    @property
    def _distills(self) -> DistillObjective | None:
        return self.objective if isinstance(self.objective, DistillObjective) else None

    @property
    def _draft_answers(self) -> bool:
        return self.answers is not None and bool(self.answers.share("draft"))

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.lora is not None and "language_model" not in self.trainable:
            raise ValueError("lora is given, and trainable does not name language_model")
        if unknown := set(self.optim.lr_by_part) - set(self.trainable):
            raise ValueError(f"optim.lr_by_part names {sorted(unknown)}, which trainable does not")
        if self.outside is not None:
            what = "a draft LVLM" if self.model == "drafter" else f"the {self.model}"
            key = "target" if self.model == "target" else "drafter"
            raise Refused("from.path", f"is a head's, and this stage trains {what}", f"give {key}.path")
        _check_packing(self)
        distills = self._distills
        if self.model == "captioner" and (distills or self.answers is not None):
            raise ValueError("objective: distill and answers are for a stage of a drafter or a target")
        if self.model == "target" and (self._draft_answers or (distills and distills.probabilities == "online")):
            raise ValueError(
                "a target learns what a regenerate stage wrote and kept: answers.shares without draft, and objective: "
                "distill with probabilities: kept"
            )
        if self._draft_answers and (distills is None or distills.cross_entropy):
            raise ValueError(
                "answers that the draft writes need objective: distill without cross_entropy, which would teach it "
                "only to repeat itself"
            )
        if distills is not None and distills.probabilities == "kept":
            if self.answers is None or self.answers.share("target") < 1:
                raise ValueError("probabilities: kept are of the target's answers: set answers.shares to {target: 1}")
            if self.answers.others == "own" and distills.divergence not in ("kl", "soft_ce"):
                raise ValueError("answers.others: own has certain tokens to learn: set objective.divergence to kl")
            if distills.temperature != 1:
                raise ValueError("probabilities: kept were taken at temperature 1: set objective.temperature to 1")
        return self


def trained_drafter(planned: Planned) -> DrafterConfig | None:
    """The section of the drafter that a stage trains; None: it trains none."""
    stage = planned.stage
    trains = isinstance(stage, TrainSettings) and stage.model == "drafter"
    return stage.drafter or planned.recipe.drafter if trains else None


def other_drafters(makers: Sequence[Planned]) -> dict[str, str]:
    """Stages that train another drafter than the recipe's -> that they do, after "which"; none where it has none."""
    return {
        maker.name: f"trains a drafter of its own, of kind {drafter.kind}, and not the recipe's"
        for maker in makers
        if (drafter := trained_drafter(maker)) is not None and maker.recipe.drafter not in (None, drafter)
    }


def row_tokens(stage: StatesSettings | RecordsSettings, name: str, lengths: np.ndarray) -> int | None:
    """Tokens of a packed row, which the longest of these samples must fit; None: the stage does not pack."""
    if stage.packing is None:
        return None
    check_lengths(lengths, stage.packing.max_tokens, f"stages.{name}.packing.max_tokens")
    return stage.packing.max_tokens


def _check_packing(stage: StatesSettings | RecordsSettings) -> None:
    """Refuse what has no rows of a known length before it is trained on."""
    if stage.packing is None:
        return
    if stage.micro_batch_size is not None:
        problem = "packing makes the rows of a forward, of packing.max_tokens"
        raise Refused("micro_batch_size", problem, "set micro_batch_size: null, or leave packing out")
    tokens = stage.packing.max_tokens
    if stage.data is not None and stage.data.max_length > tokens:
        problem = f"a row has {tokens} tokens and a sample up to {stage.data.max_length}"
        raise Refused("packing.max_tokens", problem, "set it to data.max_length or more")
    if stage.answers is not None and max(stage.answers.share("data"), stage.answers.share("target")) < 1:
        problem = "the lengths of samples change with whose answers they have, and packing counts them once"
        raise Refused("packing", problem, "name one source in answers.shares, data or target")
