"""A `train` stage on records with the target's hidden states: heads of language models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from ...core.refused import Refused
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData
from ...data.packing import PackingConfig
from ...data.sources import AnswersConfig, learns_records
from ...models.drafters.base import DrafterConfig
from ...models.drafters.head_objective import HeadObjective
from ..estimate.evaluation_memory import Memory
from ..estimate.train_memory import head_memory
from ..estimate.train_stage import describe_head, head_length
from ..run.stage import Planned, TrainingLength
from ..serve.states_builder import check_answers, sample_needs
from ..serve.target_engine import TargetEngine
from ..train.drafter import TextCheck
from ..train.fit import FitSettings
from ..train.on_states import open_heads, training_order
from ..train.packed_rows import check_packing
from ..train.states_source import CachedStates, OnlineStates, StatesSource
from .train import TrainHead, take_data


class TrainStates(TrainHead):
    """Heads of language models."""

    way: ClassVar[str] = "states"
    opens: ClassVar[Any] = open_heads
    held_out_key: ClassVar[str] = "held_out"
    # States that it kept for its own later epochs.
    working: ClassVar[tuple[str, ...]] = (*FitSettings.working, "states")

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
    def learns_answers(self) -> bool:
        """Whether each record has to bring an answer of its own."""
        return learns_records(self.answers, self.data)

    @property
    def share_held_out(self) -> float:
        return self.held_out

    @property
    def num_text_epochs(self) -> int:
        """`text_epochs`; unset, half of the epochs, rounded down."""
        return (self.epochs or 0) // 2 if self.text_epochs is None else self.text_epochs

    @property
    def _engine(self) -> TargetEngine | None:
        """The serving engine that computes the target's states in each step."""
        source = self.source
        return source.engine if isinstance(source, OnlineStates) and source.engine.is_served else None

    @property
    def reads_tables(self) -> bool:
        """Whether it loads the target's embedding and LM head alone: the target does not run in this process."""
        is_elsewhere = isinstance(self.source, CachedStates) or self._engine is not None
        return is_elsewhere and self.decoding is None

    @model_validator(mode="after")
    def _whole(self) -> TrainStates:
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
        check_packing(self)
        if self.packing is not None and self.source.kind == "cached_on_first_epoch":
            problem = "the first epoch writes the states of batches, not of packed rows"
            raise Refused("packing", problem, "use source: online or cached")
        return self

    def check(self, target: Any, drafter: DrafterConfig | None) -> None:
        """Refuses also an engine that does not run this target, and terms of a loss that the drafter has by itself."""
        super().check(target, drafter)
        if self._engine is not None:
            assert self.data is not None
            try:
                self._engine.check(target, states=True, aspect=self.data.aspect)
            except Refused as refused:
                raise refused.under("source") from None
        trained = self.drafter or drafter
        if self.objective is not None and not (trained is not None and trained.takes_objective):
            what = "none" if trained is None else trained.kind
            raise Refused("objective", f"a {what} drafter has its loss in its own section", "set drafter.loss")

    @property
    def answer_format(self) -> PromptFormat | None:
        return None if self.decoding is None else self.format

    def needs(self) -> dict[str, str | None]:
        wanted = sample_needs(self.data, self.answers) | {"processor": None, "target": None}
        if isinstance(self.source, CachedStates):
            wanted |= {"states" if name is None else f"states/{name}": name for name in self.source.stages}
        take_data(wanted, "decoding", None if self.decoding is None else self.decoding.from_stage)
        return wanted if self.earlier is None else wanted | {"drafter": self.earlier}

    def runs_target(self) -> dict[str, str]:
        hint = "cache the states first: a stage of kind cache, then source: {kind: cached}"
        return ({} if isinstance(self.source, CachedStates) else {"source": hint}) | super().runs_target()

    def alike(self) -> tuple[str, ...]:
        return (self.source.kind,)

    def training(self, plan: Planned) -> TrainingLength:
        length = super().training(plan)
        return length if self.visual_share is None else replace(length, steps=self.steps)

    def memory(self, plan: Planned) -> Memory | None:
        return head_memory(self, plan.recipe, head_length(plan))

    def lines(self, plan: Planned) -> list[str]:
        return describe_head(plan, training_order)
