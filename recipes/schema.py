"""What a recipe may say: a target, a drafter and stages, each section defined beside the code that reads it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    Discriminator,
    Field,
    SerializeAsAny,
    Tag,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ..core.errors import nearest
from ..core.refused import Refused
from ..core.section import Section
from ..core.tracking import TrackingConfig
from ..models.drafters.heads import HeadConfig
from ..models.drafters.lvlm import LvlmConfig
from ..models.drafters.pruned import PrunedConfig
from ..models.drafters.reading import AnyReading
from ..models.generators import LlamaGenTargetConfig
from ..models.llava import FAMILIES
from ..models.targets.anole import AnoleTargetConfig, refuse_lumina
from ..models.targets.load import CausalTargetConfig, LlavaTargetConfig, QwenTargetConfig
from ..trainers.engine import EngineConfig
from ..trainers.stages.base import IMAGE_GENERATORS
from ..trainers.stages.encode import EncodeStage
from ..trainers.stages.evaluate import EvaluateStage
from ..trainers.stages.generate import GenerateStage
from ..trainers.stages.publish import PublishStage
from ..trainers.stages.reading.cache import CacheStage
from ..trainers.stages.reading.evaluate import ReadingEvaluateStage
from ..trainers.stages.reading.train import ReadingTrainStage
from ..trainers.stages.regenerate import RegenerateStage
from ..trainers.stages.train import TargetTrainStage, TrainStage
from ..trainers.stages.visual.evaluate import VisualEvaluateStage
from ..trainers.stages.visual.train import VisualTrainStage
from .sections import kinds, sections

AnyTarget = Annotated[
    LlavaTargetConfig | QwenTargetConfig | CausalTargetConfig | LlamaGenTargetConfig | AnoleTargetConfig,
    Field(discriminator="kind"),
]
# `eagle` is two drafters: the head of an image generator and that of a language model.
LanguageDrafter = Annotated[LvlmConfig | AnyReading | PrunedConfig, Field(discriminator="kind")]
AnyDrafter = LanguageDrafter | HeadConfig


def model(stage: Any) -> str:
    """Whose weights a `train` stage trains; pydantic names the key after this function."""
    return str((stage.get("model") if isinstance(stage, dict) else stage.model) or "drafter")


_HeadTrain = Annotated[
    Annotated[ReadingTrainStage, Tag("drafter")] | Annotated[TargetTrainStage, Tag("target")], Discriminator(model)
]
_Shared = GenerateStage | EncodeStage | RegenerateStage | CacheStage | PublishStage
# What differs with the drafter: how it is trained and measured.
DraftLvlmStage = Annotated[_Shared | TrainStage | EvaluateStage, Field(discriminator="kind")]
HeadStage = Annotated[_Shared | _HeadTrain | ReadingEvaluateStage, Field(discriminator="kind")]
ImageStage = Annotated[_Shared | VisualTrainStage | VisualEvaluateStage, Field(discriminator="kind")]


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
        return TypeAdapter(drafter_type(target.kind)).validate_python(value)

    @field_validator("stages", mode="wrap")
    @classmethod
    def _stages_of_the_drafter(cls, value: Any, handler: Any, info: ValidationInfo) -> Any:
        stages, target = handler(value), info.data.get("target")
        if target is None or "drafter" not in info.data:
            return stages
        drafter = info.data["drafter"]
        pair = target.kind, drafter and drafter.kind
        _check_kinds(stages, *pair)
        return TypeAdapter(dict[str, stage_type(*pair)]).validate_python(stages)  # type: ignore[misc]

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
    return fields | {"drafter": drafter_type(target), "stages": dict[str, stage_type(target, drafter)]}  # type: ignore[misc]


def drafter_type(target: str) -> Any:
    """The union of the drafters' sections that a kind of target can have."""
    return HeadConfig if target in IMAGE_GENERATORS else LanguageDrafter


def drafter_kinds(target: str) -> list[str]:
    """Kinds of drafters that a kind of target can have. A draft LVLM sees what LLaVA's image processor makes."""
    possible = [kind for section in sections(drafter_type(target)) for kind in kinds(section)]
    return [kind for kind in possible if kind != "lvlm" or target in FAMILIES]


def stage_type(target: str, drafter: str | None) -> Any:
    """The union of the stages' sections that a recipe can have."""
    if target in IMAGE_GENERATORS:
        return ImageStage
    is_draft_lvlm = drafter == "lvlm" or (drafter is None and target in FAMILIES)
    return DraftLvlmStage if is_draft_lvlm else HeadStage


def _check_kinds(stages: dict[str, Any], target: str, drafter: str | None) -> None:
    """Raises `Refused` for a kind of stage that has no place beside this target and drafter."""
    reasons = {
        kind: section.unsuited(target, drafter)  # type: ignore[attr-defined]
        for section in sections(stage_type(target, drafter))
        for kind in kinds(section)
    }
    for name, stage in stages.items():
        if reason := reasons.get(_kind_of(stage)):
            possible = ", ".join(kind for kind, reason in reasons.items() if reason is None)
            raise Refused(f"{name}.kind", reason, f"kinds here are {possible}")


def _kind_of(section: Any) -> Any:
    return section.get("kind") if isinstance(section, dict) else getattr(section, "kind", None)
