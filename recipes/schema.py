"""What a recipe may say: one section for each part, each defined beside the code that reads it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..core.section import Section
from ..core.tracking import TrackingConfig
from ..models.drafters.lvlm import LvlmConfig
from ..models.targets.load import LlavaTargetConfig
from ..trainers.engine import EngineConfig
from ..trainers.stages.evaluate import EvaluateStage
from ..trainers.stages.generate import GenerateStage
from ..trainers.stages.train import TrainStage

Stage = Annotated[GenerateStage | TrainStage | EvaluateStage, Field(discriminator="kind")]


class Recipe(Section):
    """A whole run. Stages run in the order in which they are written."""

    target: LlavaTargetConfig
    drafter: LvlmConfig | None = None
    stages: dict[str, Stage] = Field(min_length=1)
    engine: EngineConfig = EngineConfig()
    tracking: TrackingConfig = TrackingConfig()
    seed: int = Field(0, ge=0)
    # Folder of the run: one folder in it for each stage.
    output: str
