"""What a recipe may say: a target, a drafter and stages. Each section is defined beside the code that reads it."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from ...core.errors import Refused, UserError, nearest
from ...core.fields import Place, Seed, file_name
from ...core.import_paths import OUTSIDE
from ...core.json_types import JsonObject, object_at, text_at
from ...core.section import Section, kinds, sections, within, written_kind
from ...core.tracking import TrackingConfig
from ...data.captioned.prompts import PromptSource
from ...models.drafters import DRAFTER, AnyDrafter
from ...models.drafters.base import DrafterConfig, PublishedDrafter
from ...models.targets.table import REFUSED, AnyTarget
from ...trainers.run.context import EngineConfig
from ...trainers.run.stage import Hardware, Stage
from ...trainers.stages.cache import CacheStage
from ...trainers.stages.contrast import ContrastStage
from ...trainers.stages.encode import EncodeStage
from ...trainers.stages.evaluate import EvaluateStage
from ...trainers.stages.generate import GenerateStage
from ...trainers.stages.prompts import PromptsStage
from ...trainers.stages.publish import PublishStage
from ...trainers.stages.regenerate import RegenerateStage
from ...trainers.stages.train import AnyTrain, TrainStage, chosen
from ...trainers.train.fit import SCRATCH

AnyStage = Annotated[
    GenerateStage | PromptsStage | EncodeStage | RegenerateStage | CacheStage | ContrastStage | AnyTrain | EvaluateStage
    | PublishStage,
    Field(discriminator="kind"),
]  # fmt: skip


def _stage_name(name: str) -> str:
    """Raises `ValueError` for names of files that a run itself writes."""
    if file_name(name) in ("recipe.yaml", "run.yaml") or re.search(r"\.(before-\d+|partial)$", name):
        raise ValueError("a run writes a file or folder of this name itself; give the stage another")
    return name


StageName = Annotated[str, AfterValidator(_stage_name)]


class Recipe(Section):
    """A whole run. Stages run in the order in which they are written."""

    # The frozen model whose output must not change.
    target: AnyTarget
    # What proposes tokens. null: stages and methods name theirs.
    drafter: SerializeAsAny[AnyDrafter | None] = None
    # Name -> stage; they run in the order in which they are written.
    stages: dict[StageName, AnyStage] = Field(min_length=1)
    # ZeRO stage and precision of training.
    engine: EngineConfig = EngineConfig()
    # What it is meant to run on; a dry run ends with 1 where an evaluation does not fit. null: nothing is compared.
    hardware: Hardware | None = None
    # wandb, beside the JSON lines that are always written.
    tracking: TrackingConfig = TrackingConfig()
    # Of every random draw of the run.
    seed: Seed = 0
    # Folder of the run: one folder in it for each stage.
    output: Place

    @field_validator("target", mode="before")
    @classmethod
    def _supported(cls, target: object) -> object:
        if refuse := REFUSED.get(written_kind(target) or ""):
            refuse()
        return target

    @field_validator("drafter", mode="plain")
    @classmethod
    def _drafter_of_the_target(cls, value: object, info: ValidationInfo) -> DrafterConfig | None:
        # Of a target that is wrong itself nothing can be said.
        target = info.data.get("target")
        if value is None or target is None:
            return None
        kind, possible = written_kind(value), drafter_kinds(target)
        if kind is not None and kind not in possible and not OUTSIDE.match(kind):
            problem = f"{kind!r} is no kind of drafter for target {target.kind}"
            close = "".join(f"did you mean {name!r}? " for name in nearest(kind, possible, 1))
            hint = f"{close}kinds here are {', '.join(possible)}, and MODULE:CLASS of another package"
            raise Refused("kind", problem, hint)
        drafter = DRAFTER.validate_python(value, context=info.context)
        drafter.check_settings(target.draws_images)
        return drafter

    @field_validator("stages", mode="wrap")
    @classmethod
    def _stages_of_the_target(cls, value: Any, check: Any, info: ValidationInfo) -> Any:
        target = info.data.get("target")
        if target is None or "drafter" not in info.data:
            return {}
        if (stages := object_at(value)) is not None:
            drafter = info.data["drafter"]
            _check_kinds(stages, target, drafter)
            value = {name: _as_meant(name, stage, target, drafter, info) for name, stage in stages.items()}
        return check(value)

    @property
    def heads(self) -> dict[str, TrainStage]:
        """The stages that train a drafter."""
        return {n: s for n, s in self.stages.items() if isinstance(s, TrainStage) and s.model == "drafter"}

    @property
    def vocabulary(self) -> int | None:
        """Ids of the tokenizer that a stage makes; None: none makes one."""
        return next((s.vocabulary for s in self.stages.values() if isinstance(s, GenerateStage)), None)

    def warnings(self) -> list[tuple[str, str]]:
        """(key of a stage, what in its settings misleads without being wrong)."""
        evaluations = [(f"stages.{n}", s) for n, s in self.stages.items() if isinstance(s, EvaluateStage)]
        return [(key, text) for key, stage in evaluations for text in stage.warnings()]

    @model_validator(mode="after")
    def _go_together(self) -> Recipe:
        # A stage without a drafter of its own trains the recipe's.
        trained = {name: stage.drafter or self.drafter for name, stage in self.heads.items()}
        beside = self.drafter.beside_path() if isinstance(self.drafter, PublishedDrafter) else ()
        if beside and not any(s.drafter is None and s.from_stage == SCRATCH for s in self.heads.values()):
            keys = " and ".join(f"drafter.{field}" for field in beside)
            problem = f"stands beside {keys}, which nothing reads: no stage that trains it says from: scratch"
            raise Refused("drafter.path", problem, f"set it to null, or {keys}")
        names: dict[str, str] = {}  # differ by more than their case, which not every file system keeps
        places: dict[tuple[str, str], str] = {}  # each is published to once
        for name, stage in self.stages.items():
            if (other := names.setdefault(name.casefold(), name)) != name:
                raise Refused(f"stages.{name}", f"stage {other} has this name but for its case", "give it another")
            if isinstance(stage, PublishStage) and stage.repo is not None and stage.upload and not stage.pull_request:
                place = (stage.repo.casefold(), stage.revision or "main")
                if (other := places.setdefault(place, name)) != name:
                    problem = f"stage {other} publishes to {stage.repo} ({place[1]}), too, and the later one would stay"
                    raise Refused(f"stages.{name}.repo", problem, "give another repository or revision")
            try:
                stage.check(self.target, self.drafter)
                check_classes(stage, self.target)
                if isinstance(stage, EvaluateStage):
                    stage.check_named(trained)
                if isinstance(stage, TrainStage):
                    stage.check_engine(self.engine)
                stage.needs()
            except Refused as refused:
                raise refused.under(f"stages.{name}") from None
        return self


def check_classes(stage: Stage, target: AnyTarget) -> None:
    """Refuses prompts of classes that the target does not have, or that it is not asked by."""
    for place, source in within(stage, PromptSource):
        if source.classes is not None and target.draws_images:
            try:
                target.check_labels([("", min(source.classes, source.max_samples or source.classes) - 1)])
            except UserError as error:
                raise Refused(f"{'.'.join(place)}.classes", error.problem, error.hint) from error


def drafter_kinds(target: AnyTarget) -> list[str]:
    """Kinds of drafters that a target's section can have. A draft LVLM sees what the target's image processor makes."""
    shares = not target.draws_images and target.family is not None and target.family.shares_pictures
    possible = [
        kind
        for section in sections(AnyDrafter)
        if issubclass(section, DrafterConfig) and (section.for_images if target.draws_images else section.for_language)
        for kind in kinds(section)
    ]
    # An ensemble is made of other drafters by a method of an evaluation.
    return [kind for kind in possible if kind not in ("ensemble", "head_tail") and (kind != "lvlm" or shares)]


def _check_kinds(stages: JsonObject, target: AnyTarget, drafter: DrafterConfig | None) -> None:
    """Raises `Refused` for a kind of stage that has no place beside this target and drafter."""
    reasons = {
        kind: section.unsuited(target, drafter)
        for section in sections(AnyStage)
        if issubclass(section, Stage)
        for kind in kinds(section)
    }
    for name, stage in stages.items():
        if reason := reasons.get(written_kind(stage) or ""):
            possible = ", ".join(kind for kind, reason in reasons.items() if reason is None)
            raise Refused(f"{name}.kind", reason, f"kinds here are {possible}")


def _as_meant(name: str, stage: Any, target: AnyTarget, drafter: DrafterConfig | None, info: ValidationInfo) -> Any:
    """A stage with what follows from target and drafter: a text target, whose family says nothing of its prompts, has
    its own template, and a `train` stage trains one of several things.
    """
    kind = text_at(stage, "kind")
    if target.reads_text_alone and isinstance(form := stage.get("format", {}) if kind else None, dict):
        written = [k for section in sections(AnyStage) if "format" in section.model_fields for k in kinds(section)]
        stage = stage | {"format": {"template": "chat"} | form} if kind in written else stage
    try:
        return chosen(stage, target, drafter, info.context) if kind == "train" else stage
    except Refused as refused:
        raise refused.under(name) from None
