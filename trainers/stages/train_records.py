"""A `train` stage on records: a draft LVLM, a tiny target or a captioner, without the target's states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ...core.errors import Refused
from ...data.conversations import PromptFormat
from ...models.drafters.base import DrafterConfig
from ..estimate.train_memory import Memory
from ..estimate.train_stage import describe_lvlm, describe_target, lvlm_memory, positions_of
from ..run.context import Context
from ..run.deepspeed_section import EngineConfig
from ..run.stage import Planned
from ..serve.states_builder import sample_needs
from ..train.loop import Training
from ..train.on_records import check_positions, open_records
from ..train.settings import RecordsSettings, trained_drafter
from .train import TrainStage, take_data


class TrainRecords(RecordsSettings, TrainStage):
    """LLaVA-like models: draft LVLMs, a tiny target, a captioner."""

    way: ClassVar[str] = "records"

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

    def open(self, context: Context, seed: int) -> Training:
        return open_records(self, context, seed)

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
            if thing == "drafter" and trained_drafter(maker) != (self.drafter or maker.recipe.drafter)
        }

    def runs_target(self) -> dict[str, str]:
        runs = {}
        if self._distills is not None and self._distills.probabilities == "online":
            hint = "let a regenerate stage keep them (keep_logprobs), and set probabilities: kept"
            runs["objective.probabilities"] = hint
        if self.model == "drafter" and self.validation is not None and self.validation.against_target is not False:
            runs["validation.against_target"] = "set it to false"
        return runs

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
