"""A `train` stage on records with the target's hidden states: heads of language models."""

from __future__ import annotations

from typing import ClassVar

from ...core.errors import Refused
from ...data.conversations import PromptFormat
from ...models.drafters.base import DrafterConfig
from ...models.targets.table import AnyTarget
from ..estimate.train_memory import Memory, head_memory
from ..estimate.train_stage import describe_head, head_length
from ..run.context import Context
from ..run.stage import Planned
from ..serve.states_builder import sample_needs
from ..train.fit import FitSettings
from ..train.loop import Training
from ..train.on_states import open_heads, training_order
from ..train.settings import StatesSettings
from .train import TrainHead, take_data


class TrainStates(StatesSettings, TrainHead):
    """Heads of language models."""

    way: ClassVar[str] = "states"
    # States that it kept for its own later epochs.
    working: ClassVar[tuple[str, ...]] = (*FitSettings.working, "states")

    def check(self, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        """Refuses also an engine that does not run this target, and terms of a loss that the drafter has by itself."""
        super().check(target, drafter)
        if (engine := self.source.serving_engine) is not None:
            assert self.data is not None
            try:
                engine.check(target, states=True, aspect=self.data.aspect)
            except Refused as refused:
                raise refused.under("source") from None
        trained = self.drafter or drafter
        if self.objective is not None and not (trained is not None and trained.takes_objective):
            what = "none" if trained is None else trained.kind
            raise Refused("objective", f"a {what} drafter has its loss in its own section", "set drafter.loss")

    @property
    def answer_format(self) -> PromptFormat | None:
        return None if self.decoding is None else self.format

    def open(self, context: Context, seed: int) -> Training:
        return open_heads(self, context, seed)

    def needs(self) -> dict[str, str | None]:
        wanted = sample_needs(self.data, self.answers) | {"processor": None, "target": None}
        wanted |= {"states" if name is None else f"states/{name}": name for name in self.source.stages}
        take_data(wanted, "decoding", None if self.decoding is None else self.decoding.data.from_stage)
        return wanted if self.earlier is None else wanted | {"drafter": self.earlier}

    def runs_target(self) -> dict[str, str]:
        hint = "cache the states first: a stage of kind cache, then source: {kind: cached}"
        return ({} if self.source.kind == "cached" else {"source": hint}) | super().runs_target()

    def memory(self, plan: Planned) -> Memory | None:
        return head_memory(self, plan.recipe, head_length(plan))

    def lines(self, plan: Planned) -> list[str]:
        return describe_head(plan, training_order)
