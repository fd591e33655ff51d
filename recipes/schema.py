"""What a recipe may say: a target, a drafter and stages, each section defined beside the code that reads it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    Field,
    SerializeAsAny,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ..core.errors import did_you_mean, nearest
from ..core.refused import Refused
from ..core.section import Section
from ..core.tracking import TrackingConfig
from ..models.drafters import AnyDrafter
from ..models.drafters.base import DrafterConfig
from ..models.generators import LlamaGenTargetConfig
from ..models.llava import FAMILIES
from ..models.targets.anole import AnoleTargetConfig, refuse_lumina
from ..models.targets.load import CausalTargetConfig, LlavaTargetConfig, QwenTargetConfig
from ..trainers.engine import EngineConfig
from ..trainers.stages.base import IMAGE_GENERATORS
from ..trainers.stages.cache import CacheStage
from ..trainers.stages.encode import EncodeStage
from ..trainers.stages.evaluate import EvaluateStage
from ..trainers.stages.generate import GenerateStage
from ..trainers.stages.publish import PublishStage
from ..trainers.stages.regenerate import RegenerateStage
from ..trainers.stages.train import TrainStage
from .sections import kinds, sections

AnyTarget = Annotated[
    LlavaTargetConfig | QwenTargetConfig | CausalTargetConfig | LlamaGenTargetConfig | AnoleTargetConfig,
    Field(discriminator="kind"),
]
AnyStage = Annotated[
    GenerateStage | EncodeStage | RegenerateStage | CacheStage | TrainStage | EvaluateStage | PublishStage,
    Field(discriminator="kind"),
]


class Recipe(Section):
    """A whole run. Stages run in the order in which they are written."""

    target: AnyTarget
    drafter: SerializeAsAny[AnyDrafter | None] = None
    stages: dict[str, Any] = Field(min_length=1)
    engine: EngineConfig = EngineConfig()
    tracking: TrackingConfig = TrackingConfig()
    seed: int = Field(0, ge=0)
    # Folder of the run: one folder in it for each stage.
    output: str

    @field_validator("target", mode="before")
    @classmethod
    def _supported(cls, value: Any) -> Any:
        if _kind_of(value) == "lumina-mgpt":
            refuse_lumina()
        return value

    @field_validator("drafter", mode="plain")
    @classmethod
    def _drafter_of_the_target(cls, value: Any, info: ValidationInfo) -> Any:
        # Of a target that is wrong itself nothing can be said.
        target = info.data.get("target")
        if value is None or target is None:
            return None
        kind, possible = _kind_of(value), drafter_kinds(target.kind)
        if kind is not None and kind not in possible:
            problem = f"{kind!r} is no kind of drafter for target {target.kind}"
            close = "".join(f"did you mean {name!r}? " for name in nearest(str(kind), possible, 1))
            raise Refused("kind", problem, f"{close}kinds here are {', '.join(possible)}")
        drafter = TypeAdapter(AnyDrafter).validate_python(value)
        for name in sorted(drafter.model_fields_set & drafter.unread(target.draws_images)):
            known = {*type(drafter).model_fields} - drafter.unread(target.draws_images)
            other = "language models" if target.draws_images else "image generators"
            raise Refused(name, f"nothing reads it: it is of {kind} heads for {other}", did_you_mean(name, known))
        return drafter

    @field_validator("stages", mode="wrap")
    @classmethod
    def _stages_of_the_drafter(cls, value: Any, handler: Any, info: ValidationInfo) -> Any:
        stages, target = handler(value), info.data.get("target")
        if target is None or "drafter" not in info.data:
            return stages
        drafter = info.data["drafter"]
        stages = {
            name: TrainStage.of_target(stage, target.draws_images) if _kind_of(stage) == "train" else stage
            for name, stage in stages.items()
        }
        pair = target.kind, drafter and drafter.kind
        _check_kinds(stages, *pair)
        return TypeAdapter(dict[str, AnyStage]).validate_python(stages)

    @model_validator(mode="after")
    def _read_by_something(self) -> Recipe:
        for name, stage in self.stages.items():
            try:
                stage.check(self.target, self.drafter)
            except Refused as refused:
                raise refused.under(f"stages.{name}") from None
        return self


def fields_of(target: Any, drafter: Any) -> dict[str, Any]:
    """Key of a recipe -> annotation, for these kinds of target and drafter (of which either may be wrong)."""
    fields = {name: field.annotation for name, field in Recipe.model_fields.items()}
    return fields | {"drafter": AnyDrafter, "stages": dict[str, AnyStage]}


def drafter_kinds(target: str) -> list[str]:
    """Kinds of drafters that a kind of target can have. A draft LVLM sees what LLaVA's image processor makes."""
    possible = [
        kind
        for section in sections(AnyDrafter)
        if issubclass(section, DrafterConfig)
        and (section.for_images if target in IMAGE_GENERATORS else section.for_language)
        for kind in kinds(section)
    ]
    # An ensemble is made of other drafters by a method of an evaluation.
    return [kind for kind in possible if kind != "ensemble" and (kind != "lvlm" or target in FAMILIES)]


def _check_kinds(stages: dict[str, Any], target: str, drafter: str | None) -> None:
    """Raises `Refused` for a kind of stage that has no place beside this target and drafter."""
    reasons = {
        kind: section.unsuited(target, drafter)  # type: ignore[attr-defined]
        for section in sections(AnyStage)
        for kind in kinds(section)
    }
    for name, stage in stages.items():
        if reason := reasons.get(_kind_of(stage)):
            possible = ", ".join(kind for kind, reason in reasons.items() if reason is None)
            raise Refused(f"{name}.kind", reason, f"kinds here are {possible}")


def _kind_of(section: Any) -> Any:
    return section.get("kind") if isinstance(section, dict) else getattr(section, "kind", None)
