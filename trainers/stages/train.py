"""Stage kind `train`: train the drafter, or another model of the recipe, under DeepSpeed.

What it trains on follows from target and drafter, and each way is a class with its settings, checks and lines of a dry
run: `train_records.py`, `train_states.py` (records with the target's states) and `train_codes.py`; `train_ways.py`
chooses. The loss is the drafter's own: `training_objective` in models/drafters/KIND.py. The loop is
trainers/train/loop.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import model_validator

from ...core.errors import Refused, did_you_mean
from ...core.json_types import JsonObject
from ...models.drafters.base import DrafterConfig
from ...models.targets.table import AnyTarget
from ..estimate.train_memory import Memory
from ..estimate.train_stage import start_line
from ..run.context import Context
from ..run.stage import Planned
from ..train.engine import init_distributed
from ..train.fit import fit, seed_all
from ..train.loop import Training
from ..train.settings import HeadSettings, TrainSettings, other_drafters


class Chosen(JsonObject):
    """A `train` stage's section as written, what it trains on, and keys that other ways of training read."""

    way: str
    foreign: frozenset[str]


class TrainStage(TrainSettings):
    """What all ways of training share: where they start, what they take and make, and their run."""

    trains: ClassVar[bool] = True
    way: ClassVar[str]  # what it trains on

    @model_validator(mode="wrap")
    @classmethod
    def _of_this_way(cls, section: Any, parse: Callable[[Any], Self]) -> Self:
        """Keys of another way of training are refused once all others are right."""
        foreign = [key for key in section if key in section.foreign] if isinstance(section, Chosen) else []
        stage = parse({key: value for key, value in section.items() if key not in foreign} if foreign else section)
        if foreign:
            known = sorted(field.alias or name for name, field in cls.model_fields.items())
            raise Refused(
                foreign[0], f"nothing reads it: this stage trains on {cls.way}", did_you_mean(foreign[0], known)
            )
        return stage

    def makes(self) -> set[str]:
        return {self.model}

    def misfits(self, thing: str, makers: Sequence[Planned], inputs: Mapping[str, Planned]) -> dict[str, str]:
        """Weights of another drafter, where `from` names none."""
        return other_drafters(makers) if thing == "drafter" and self.earlier is None else {}

    def runs_target(self) -> dict[str, str]:
        """Setting that lets each rank run the target on batches of its own -> what to set in its place."""
        return {}

    def run(self, context: Context) -> None:
        init_distributed()
        context = replace(context, drafter=self.drafter or context.drafter)
        seed = context.seed if self.seed is None else self.seed
        seed_all(seed)
        training = self.open(context, seed)
        training.finish(fit(self, context, training))

    def open(self, context: Context, seed: int) -> Training:
        """Opens its data and its module."""
        raise NotImplementedError

    def reads_of_drafter(self, drafter: DrafterConfig | None) -> JsonObject | None:
        """Nothing, where it trains another model, or a drafter of its own; a captioner is built as the draft is."""
        is_read = self.model in ("drafter", "captioner") and self.drafter is None
        return super().reads_of_drafter(drafter) if is_read else None

    def memory(self, plan: Planned) -> Memory | None:
        """The memory of one training step on its fullest GPU, in a dry run; None: not counted."""
        raise NotImplementedError

    def describe(self, plan: Planned) -> list[str]:
        started = [] if self.outside is None else [start_line(self.outside)]
        return [*started, *self.lines(plan)]

    def lines(self, plan: Planned) -> list[str]:
        """Its lines of a dry run, behind where it starts."""
        raise NotImplementedError


def take_data(wanted: dict[str, str | None], key: str, name: str | None) -> None:
    """Adds the stage that the data at `key` is of. Raises `Refused` where `data` is of another."""
    if name is not None:
        if wanted.get("data", name) != name:
            problem = f"is of stage {name}, and data of stage {wanted['data']}: a stage takes data from one"
            raise Refused(f"{key}.data.from", problem, "take both from one stage, or name files by path")
        wanted["data"] = name


class TrainHead(HeadSettings, TrainStage):
    """What is trained with the target's states, of records or of codes."""

    def runs_target(self) -> dict[str, str]:
        return {"decoding": "leave it out, and compare weights by an evaluate stage"} if self.decoding else {}

    def check(self, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        """Refuses a drafter that this target does not have, and weights outside the run that it cannot start from."""
        if self.drafter is not None:
            try:
                self.drafter.check_settings(target.draws_images)
            except Refused as refused:
                raise refused.under("drafter") from None
        trained = self.drafter or drafter
        if self.outside is None or trained is None:
            return
        if not trained.starts_outside or (target.draws_images and not trained.for_images):
            problem = f"names a head, and this stage trains a drafter of kind {trained.kind}"
            raise Refused("from.path", problem, "leave it out")
        if trained.provides():
            problem = f"stands beside drafter.path, {trained.display_name}, which nothing reads then"
            raise Refused("from.path", problem, "leave this one out, and name the weights in drafter.path")
