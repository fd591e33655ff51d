"""A `train` stage on records: a draft LVLM, a tiny target or a captioner, without the target's states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ...core.refused import Refused
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData
from ...data.packing import PackingConfig
from ...data.sources import AnswersConfig, learns_records
from ...models.drafters.base import DrafterConfig
from ...models.drafters.distillation import CrossEntropyObjective, DistillObjective
from ...models.lora import LoraConfig
from ...models.parts import Part
from ..estimate.evaluation_memory import Memory
from ..estimate.train_stage import describe_lvlm, describe_target, lvlm_memory, positions_of
from ..run.deepspeed_section import EngineConfig
from ..run.stage import Planned
from ..serve.states_builder import sample_needs
from ..train.on_records import check_positions, open_records
from ..train.packed_rows import check_packing
from ..train.validate import RecordsValidation
from .train import TrainStage, take_data


class TrainRecords(TrainStage):
    """LLaVA-like models: draft LVLMs, a tiny target, a captioner."""

    way: ClassVar[str] = "records"
    opens: ClassVar[Any] = open_records

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
    def learns_answers(self) -> bool:
        """Whether each record has to bring an answer of its own."""
        return learns_records(self.answers, self.data)

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
    def _known_parts(self) -> TrainRecords:
        if self.lora is not None and "language_model" not in self.trainable:
            raise ValueError("lora is given, and trainable does not name language_model")
        if unknown := set(self.optim.lr_by_part) - set(self.trainable):
            raise ValueError(f"optim.lr_by_part names {sorted(unknown)}, which trainable does not")
        if self.outside is not None:
            what = "a draft LVLM" if self.model == "drafter" else f"the {self.model}"
            key = "target" if self.model == "target" else "drafter"
            raise Refused("from.path", f"is a head's, and this stage trains {what}", f"give {key}.path")
        check_packing(self)
        return self

    @model_validator(mode="after")
    def _fitting_answers(self) -> TrainRecords:
        distills = self._distills
        if self.model != "drafter" and (distills or self.answers is not None):
            raise ValueError("objective: distill and answers are for a drafter's stage")
        if self._draft_answers and (distills is None or distills.cross_entropy):
            raise ValueError(
                "answers that the draft writes need objective: distill without cross_entropy, which would teach it "
                "only to repeat itself"
            )
        if distills is not None and distills.probabilities == "kept":
            if self.answers is None or self.answers.share("target") < 1:
                raise ValueError("probabilities: kept are of the target's answers: set answers.shares to {target: 1}")
            if distills.temperature != 1:
                raise ValueError("probabilities: kept were taken at temperature 1: set objective.temperature to 1")
        return self

    def check_engine(self, engine: EngineConfig) -> None:
        """Refuse drafts that write answers while ZeRO 3 shares their weights out: ranks would wait for each other."""
        if self._draft_answers and engine.zero_stage == 3:
            raise Refused(
                "answers",
                "the draft writes answers itself, and engine.zero_stage 3 shares its weights out: ranks whose answers "
                "differ in length would wait for each other for ever",
                "use engine.zero_stage 0 to 2: a draft is small",
            )

    @property
    def answer_format(self) -> PromptFormat | None:
        return self.format if self._draft_answers else None

    def needs(self) -> dict[str, str | None]:
        wanted = sample_needs(self.data, self.answers) | {"processor": None}
        if self.model != "target":
            wanted["target"] = None
        take_data(wanted, "validation", None if self.validation is None else self.validation.data.from_stage)
        return wanted if self.earlier is None else wanted | {self.model: self.earlier}

    def misfits(self, thing: str, makers: Sequence[Planned], inputs: Mapping[str, Planned]) -> dict[str, str]:
        """Drafts that are built otherwise than this stage's: what a draft reads stands in its own folder."""
        return {
            maker.name: "trains a drafter with other settings"
            for maker in makers
            if thing == "drafter" and maker.trained_drafter != (self.drafter or maker.recipe.drafter)
        }

    def runs_target(self) -> dict[str, str]:
        runs = {}
        if self._distills is not None and self._distills.probabilities == "online":
            hint = "let a regenerate stage keep them (keep_logprobs), and set probabilities: kept"
            runs["objective.probabilities"] = hint
        if self.model == "drafter" and self.validation is not None and self.validation.against_target is not False:
            runs["validation.against_target"] = "set it to false"
        return runs

    def alike(self) -> tuple[str, ...]:
        return ("" if self.objective is None else self.objective.kind, *self.trainable)

    def _is_of_drafts(self, plan: Planned) -> bool:
        drafter: DrafterConfig | None = self.drafter or plan.recipe.drafter
        return self.model != "target" or drafter is None or drafter.base_kind == "lvlm"

    def memory(self, plan: Planned) -> Memory | None:
        """The memory of its fullest GPU; None for a tiny target, which demos train."""
        return lvlm_memory(plan) if self._is_of_drafts(plan) else None

    def lines(self, plan: Planned) -> list[str]:
        if not self._is_of_drafts(plan):
            return describe_target(plan)
        check_positions(positions_of(plan), self)
        return describe_lvlm(plan)
