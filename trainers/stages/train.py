"""Stage kind `train`: train the drafter, or another model of the recipe, under DeepSpeed.

What it trains on follows from target and drafter (`chosen`), and each way is a class: records, records with the
target's hidden states, image codes. The loss is the drafter's own: `training_objective` in models/drafters/KIND.py. The
loop is trainers/train/loop.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Discriminator, Tag, ValidationError

from ...core.errors import Refused
from ...core.json_types import JsonObject
from ...data.conversations import PromptFormat
from ...models.drafters import DRAFTER
from ...models.drafters.base import DrafterConfig
from ...models.targets.table import AnyTarget
from ..estimate import train_stage
from ..estimate.train_memory import Memory, head_memory, image_head_memory
from ..run.context import Context, EngineConfig
from ..run.stage import Planned
from ..serve.states_builder import sample_needs
from ..train.engine import init_distributed
from ..train.fit import TrainSettings, fit
from ..train.loop import Training
from ..train.on_codes import lacking, open_codes
from ..train.on_records import check_positions, open_records
from ..train.on_states import open_heads, training_order
from ..train.settings import (
    CodesSettings,
    HeadTrainSettings,
    RecordsSettings,
    StatesSettings,
    other_drafters,
    trained_drafter,
)


class Chosen(JsonObject):
    """A `train` stage's section as written, and what it trains on."""

    way: str


class TrainStage(TrainSettings):
    """What all ways of training share: where they start, what they take and make, and their run."""

    trains: ClassVar[bool] = True

    def makes(self) -> set[str]:
        return {self.model}

    def misfits(self, thing: str, makers: Sequence[Planned], inputs: Mapping[str, Planned]) -> dict[str, str]:
        """Weights of another drafter, where `from` names none."""
        return other_drafters(makers) if thing == "drafter" and self.earlier is None else {}

    def check_engine(self, engine: EngineConfig) -> None:
        """Refuse Muon where matrices are shared out among ranks, or where names do not say which ones are hidden."""
        if self.optim.name != "muon":
            return
        if self.model in ("vq", "reader") or isinstance(self, RecordsSettings):
            problem = f"muon trains heads on states, and image generators, and this stage trains {self.trained}"
            raise Refused("optim.name", problem, "leave it out: adamw")
        if engine.zero_stage:
            problem = f"muon needs whole matrices, and engine.zero_stage {engine.zero_stage} shares them out"
            raise Refused("optim.name", problem, "set engine.zero_stage: 0, which a head fits, or leave muon out")

    def runs_target(self) -> dict[str, str]:
        """Setting that lets each rank run the target on batches of its own -> what to set in its place."""
        return {}

    def run(self, context: Context) -> None:
        from transformers import set_seed

        init_distributed()
        context = replace(context, drafter=self.drafter or context.drafter)
        seed = context.seed if self.seed is None else self.seed
        set_seed(seed)
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
        started = [] if self.outside is None else [train_stage.start_line(self.outside)]
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


class TrainHead(HeadTrainSettings, TrainStage):
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


class TrainRecords(RecordsSettings, TrainStage):
    """LLaVA-like models: draft LVLMs, a tiny target, a captioner."""

    way: ClassVar[str] = "records"

    def check_engine(self, engine: EngineConfig) -> None:
        """Refuse drafts that write answers while ZeRO 3 shares their weights out: ranks would wait for each other."""
        super().check_engine(engine)
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
        return train_stage.lvlm_memory(plan) if self._is_of_drafts(plan) else None

    def lines(self, plan: Planned) -> list[str]:
        if not self._is_of_drafts(plan):
            return train_stage.describe_target(plan)
        check_positions(train_stage.positions_of(plan), self)
        return train_stage.describe_lvlm(plan)


class TrainStates(StatesSettings, TrainHead):
    """Heads of language models."""

    way: ClassVar[str] = "states"
    # States that it kept for its own later epochs.
    working: ClassVar[tuple[str, ...]] = (*TrainSettings.working, "states")

    def check(self, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        """Refuses also an engine that does not run this target, and terms of a loss that the drafter has by itself."""
        super().check(target, drafter)
        if (engine := self.serving_engine) is not None:
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
        if self.source.kind == "cached":
            wanted |= {"states" if name is None else f"states/{name}": name for name in self.source.stages}
        take_data(wanted, "decoding", None if self.decoding is None else self.decoding.data.from_stage)
        return wanted if self.earlier is None else wanted | {"drafter": self.earlier}

    def runs_target(self) -> dict[str, str]:
        hint = "cache the states first: a stage of kind cache, then source: {kind: cached}"
        return ({} if self.source.kind == "cached" else {"source": hint}) | super().runs_target()

    def memory(self, plan: Planned) -> Memory | None:
        return head_memory(self, plan.recipe, train_stage.head_length(plan))

    def lines(self, plan: Planned) -> list[str]:
        return train_stage.describe_head(plan, training_order)


class TrainCodes(CodesSettings, TrainHead):
    """Heads of image generators, and the synthetic dataset's image tokenizer (vq), reader and generator."""

    way: ClassVar[str] = "codes"

    def makes(self) -> set[str]:
        return {"target", "text"} if self.model == "target" else {self.model}

    def open(self, context: Context, seed: int) -> Training:
        return open_codes(self, context, seed)

    def needs(self) -> dict[str, str | None]:
        wanted: dict[str, str | None] = {} if self.data.path else {"codes": self.data.from_stage}
        if self.model == "drafter":
            wanted["target"] = None
        if self.model == "target":
            wanted["tokenizer"] = None
        if self.decoding is not None:
            wanted |= {"vq": None, "text": None}
            if self.decoding.prompts.from_stage is not None:
                wanted["data"] = self.decoding.prompts.from_stage
        return wanted if self.earlier is None else wanted | {self.model: self.earlier}

    def misfits(self, thing: str, makers: Sequence[Planned], inputs: Mapping[str, Planned]) -> dict[str, str]:
        """Also shards without what this model reads."""
        return lacking(makers, self.model) if thing == "codes" else super().misfits(thing, makers, inputs)

    def memory(self, plan: Planned) -> Memory | None:
        """The memory of its fullest GPU; None for an image tokenizer or a reader, which demos train."""
        return image_head_memory(self, plan.recipe)

    def lines(self, plan: Planned) -> list[str]:
        return train_stage.describe_image_model(plan)


AnyTrain = Annotated[
    Annotated[TrainRecords, Tag("records")]
    | Annotated[TrainStates, Tag("states")]
    | Annotated[TrainCodes, Tag("codes")],
    Discriminator(lambda section: getattr(section, "way", None)),
]


def chosen(section: JsonObject, target: AnyTarget, drafter: DrafterConfig | None, context: object = None) -> Chosen:
    """The section with what it trains on, beside the recipe's target and drafter; `context` is of pydantic's
    validation. Raises `Refused` where nothing trains this model.
    """
    result = Chosen(section)
    result.way = _trains_on(section, target, drafter, context)
    return result


def _trains_on(section: JsonObject, target: AnyTarget, drafter: DrafterConfig | None, context: object) -> str:
    model, named = section.get("model", "drafter"), section.get("drafter")
    if model == "captioner" and not target.draws_images and (drafter is None or drafter.trains_on != "records"):
        raise Refused("model", "'captioner' is no model here: it is built as a draft LVLM is", "leave it out")
    if model != "drafter":
        return "codes" if target.draws_images else "records"
    if named is not None:
        try:
            drafter = DRAFTER.validate_python(named, context=context)
        except ValidationError:  # the stage's own validation says what is wrong with it, and where
            return "codes" if target.draws_images else "records" if "trainable" in section else "states"
    if drafter is None or drafter.trains_on is None:
        what = "names none" if drafter is None else f"is of kind {drafter.kind}, which is not trained"
        raise Refused("model", f"a drafter is trained and the recipe {what}", "name one")
    return "codes" if target.draws_images else drafter.trains_on
