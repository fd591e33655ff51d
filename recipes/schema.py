"""What a recipe may say: one section for each part, each defined beside the code that reads it.

The kind of target chooses the track, and with it the kinds of drafters and stages that a recipe can have.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from ..core.section import Section
from ..core.tracking import TrackingConfig
from ..models.drafters.heads import HeadConfig
from ..models.drafters.lvlm import LvlmConfig
from ..models.generators import LlamaGenTargetConfig
from ..models.targets.anole import AnoleTargetConfig
from ..models.targets.load import LlavaTargetConfig
from ..trainers.engine import EngineConfig
from ..trainers.stages.evaluate import EvaluateStage
from ..trainers.stages.generate import GenerateStage
from ..trainers.stages.regenerate import RegenerateAnswersStage
from ..trainers.stages.train import TrainStage
from ..trainers.stages.visual.encode import EncodeStage
from ..trainers.stages.visual.evaluate import VisualEvaluateStage
from ..trainers.stages.visual.generate import GenerateCaptionedStage
from ..trainers.stages.visual.regenerate import RegenerateStage
from ..trainers.stages.visual.train import VisualTrainStage

LvlmStage = Annotated[GenerateStage | TrainStage | RegenerateAnswersStage | EvaluateStage, Field(discriminator="kind")]
VisualStage = Annotated[
    GenerateCaptionedStage | EncodeStage | RegenerateStage | VisualTrainStage | VisualEvaluateStage,
    Field(discriminator="kind"),
]


class Recipe(Section):
    """A whole run. Stages run in the order in which they are written."""

    target: Any
    drafter: Any = None
    stages: dict[str, Any] = Field(min_length=1)
    engine: EngineConfig = EngineConfig()
    tracking: TrackingConfig = TrackingConfig()
    seed: int = Field(0, ge=0)
    # Folder of the run: one folder in it for each stage.
    output: str


class LvlmRecipe(Recipe):
    """A draft LVLM for LLaVA."""

    target: LlavaTargetConfig
    drafter: LvlmConfig | None = None
    stages: dict[str, LvlmStage] = Field(min_length=1)


class VisualRecipe(Recipe):
    """A head for an image generator."""

    target: Annotated[LlamaGenTargetConfig | AnoleTargetConfig, Field(discriminator="kind")]
    drafter: HeadConfig | None = None
    stages: dict[str, VisualStage] = Field(min_length=1)

    @model_validator(mode="after")
    def _presets_of_the_target(self) -> VisualRecipe:
        own, other = ("adt", "adt-llamagen") if self.target.kind == "anole" else ("adt-llamagen", "adt")
        for name, stage in self.stages.items():
            if isinstance(stage, VisualEvaluateStage) and stage.preset == other:
                raise ValueError(f"stages.{name}.preset {other} has the trees of another target; use {own}")
        return self


# kind of target -> the recipe's schema.
TRACKS: dict[str, type[Recipe]] = {
    "llava": LvlmRecipe,
    "llava_next": LvlmRecipe,
    "llava_onevision": LvlmRecipe,
    "llamagen": VisualRecipe,
    "anole": VisualRecipe,
}
