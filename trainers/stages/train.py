"""Stage kind `train`: train the drafter, or another model of the recipe, under DeepSpeed.

What differs is a section (`train_settings.py`): `data` (conversations or codes), `objective`, `drafter`. What trains on
what is in `trainers/training/`: records (draft LVLMs), records with the target's states (heads), or codes (image
generators). The loss is the drafter's own: `training_objective` in models/drafters/KIND.py. The loop is
trainers/loop.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...core.refused import Refused
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData
from ...data.shards.codes import ShardData
from ..context import Context
from ..engine import init_distributed
from ..estimate.memory import Memory
from ..estimate.train import (
    describe_head,
    describe_image_model,
    describe_lvlm,
    describe_target,
    head_length,
    lvlm_memory,
    positions_of,
    start_line,
    told_steps,
)
from ..estimate.training import head_memory, image_head_memory
from ..fit import FitSettings, fit, seed_all
from ..stage import Planned, TrainingLength, other_drafters
from ..training.codes import lacking, open_codes
from ..training.conversations import check_positions, open_records
from ..training.heads_on_states import open_heads, training_order
from ..training.sources import CachedStates
from ..training.states import sample_needs
from .train_settings import TrainSettings


class TrainStage(TrainSettings):
    trains: ClassVar[bool] = True
    # States that it kept for its own later epochs.
    working: ClassVar[tuple[str, ...]] = (*FitSettings.working, "states")
    ways: ClassVar[dict[str, Any]] = {"records": open_records, "states": open_heads, "codes": open_codes}

    def makes(self) -> set[str]:
        if self.model == "target" and isinstance(self.data, ShardData):
            return {"target", "text"}
        return {self.model}

    @property
    def answer_format(self) -> PromptFormat | None:
        decodes = self.decoding is not None and self.decoding.data is not None
        return self.format if decodes or (self.answers is not None and self.answers.share("draft")) else None

    def needs(self) -> dict[str, str | None]:
        """Thing -> the stage that makes it; None: the latest that does."""
        wanted = self._codes_need() if isinstance(self.data, ShardData) else self._records_need()
        if self.earlier is not None:
            wanted[self.model] = self.earlier
        return wanted

    def _codes_need(self) -> dict[str, str | None]:
        assert isinstance(self.data, ShardData)
        wanted: dict[str, str | None] = {} if self.data.path else {"codes": self.data.from_stage}
        if self.model == "drafter":
            wanted["target"] = None
        if self.model == "target":
            wanted["tokenizer"] = None
        if self.decoding is not None:
            wanted |= {"vq": None, "text": None}
            if self.decoding.from_stage is not None:
                wanted["data"] = self.decoding.from_stage
        return wanted

    def _records_need(self) -> dict[str, str | None]:
        data = self.data if isinstance(self.data, ConversationData) else None
        wanted = sample_needs(data, self.answers) | {"processor": None}
        if self.model != "target":
            wanted["target"] = None
        if isinstance(self.source, CachedStates):
            for name in self.source.stages:
                wanted["states" if name is None else f"states/{name}"] = name
        held_out = None if self.validation is None else self.validation.data
        others = {
            "decoding": None if self.decoding is None else self.decoding.from_stage,
            "validation": None if held_out is None else held_out.from_stage,
        }
        for key, name in others.items():
            if name is not None:
                if wanted.get("data", name) != name:
                    problem = f"is of stage {name}, and data of stage {wanted['data']}: a stage takes data from one"
                    raise Refused(f"{key}.data.from", problem, "take both from one stage, or name files by path")
                wanted["data"] = name
        return wanted

    def misfits(self, thing: str, makers: Sequence[Planned], inputs: Mapping[str, Planned]) -> dict[str, str]:
        """Weights of another drafter, where `from` names none; shards without what this model reads."""
        if thing == "codes":
            return lacking(makers, self.model)
        return other_drafters(makers) if thing == "drafter" and self.earlier is None else {}

    def mend(self, thing: str) -> str:
        return "add it to `write` of an encode stage before this one" if thing == "codes" else super().mend(thing)

    def run(self, context: Context) -> None:
        init_distributed()
        context = context.with_drafter(self.drafter)
        seed = context.seed if self.seed is None else self.seed
        seed_all(seed)
        training = self.ways[self.way(context.target, context.drafter)](self, context, seed)
        training.finish(fit(self, context, training))

    def training(self, plan: Planned) -> TrainingLength:
        """Steps as in a dry run, but for data on disk, which would have to be read."""
        drafter = (self.drafter or plan.recipe.drafter) if self.model == "drafter" else None
        objective = "" if self.model != "drafter" or self.objective is None else self.objective.kind
        what = self.model, "" if drafter is None else drafter.kind, self.source.kind, objective
        return TrainingLength((*what, *(self.trainable or ())), told_steps(plan), self.batch_size)

    def memory(self, plan: Planned) -> Memory | None:
        """Of its fullest GPU; None: of a tiny target, an image tokenizer or a reader, which demos train."""
        way = self.way(plan.recipe.target, plan.recipe.drafter)
        if way == "codes":
            return image_head_memory(self, plan.recipe)
        if way == "states":
            return head_memory(self, plan.recipe, head_length(plan))
        return None if self.model == "target" and not self._is_of_drafts(plan) else lvlm_memory(plan)

    def _is_of_drafts(self, plan: Planned) -> bool:
        return plan.recipe.drafter is None or plan.recipe.drafter.base_kind == "lvlm"

    def describe(self, plan: Planned) -> list[str]:
        started = [] if self.outside is None else [start_line(self.outside)]
        return [*started, *self._described(plan)]

    def _described(self, plan: Planned) -> list[str]:
        way = self.way(plan.recipe.target, plan.recipe.drafter)
        if way == "codes":
            return describe_image_model(plan)
        if way == "states":
            return describe_head(plan, training_order)
        if self.model == "target" and not self._is_of_drafts(plan):
            return describe_target(plan)
        check_positions(positions_of(plan), self)
        return describe_lvlm(plan)

    @classmethod
    def of_target(cls, section: dict[str, Any], draws_images: bool) -> dict[str, Any]:
        """A section as a recipe has it, whose `data` says what it is: codes, where the target draws images."""
        data = section.get("data")
        if not draws_images or not isinstance(data, dict) or "kind" in data:
            return section
        return {**section, "data": {"kind": "codes", **data}}
