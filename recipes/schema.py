"""What a recipe may say: one section for each part, each defined beside the code that reads it.

The kinds of target and drafter choose the track, and with it the kinds of stages that a recipe can have.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from ..core.section import Section
from ..core.tracking import TrackingConfig
from ..models.drafters.heads import HeadConfig
from ..models.drafters.lvlm import LvlmConfig
from ..models.drafters.pruned import PrunedConfig
from ..models.drafters.reading import READING_KINDS, AnyReading
from ..models.generators import LlamaGenTargetConfig
from ..models.llava import FAMILIES
from ..models.qwen import QWEN_KINDS
from ..models.targets.anole import AnoleTargetConfig
from ..models.targets.load import LlavaTargetConfig, TargetConfig
from ..trainers.engine import EngineConfig
from ..trainers.stages.evaluate import EvaluateStage
from ..trainers.stages.generate import GenerateStage
from ..trainers.stages.publish import PublishStage, VisualPublishStage
from ..trainers.stages.reading.cache import CacheStage
from ..trainers.stages.reading.evaluate import ReadingEvaluateStage
from ..trainers.stages.reading.train import ReadingTrainStage
from ..trainers.stages.regenerate import RegenerateAnswersStage
from ..trainers.stages.train import TargetTrainStage, TrainStage
from ..trainers.stages.visual.encode import EncodeStage
from ..trainers.stages.visual.evaluate import VisualEvaluateStage
from ..trainers.stages.visual.generate import GenerateCaptionedStage
from ..trainers.stages.visual.regenerate import RegenerateStage
from ..trainers.stages.visual.train import VisualTrainStage

LvlmStage = Annotated[
    GenerateStage | TrainStage | RegenerateAnswersStage | EvaluateStage | PublishStage, Field(discriminator="kind")
]


def model(stage: Any) -> str:
    """Whose weights a `train` stage trains; pydantic names the key after this function."""
    return str((stage.get("model") if isinstance(stage, dict) else stage.model) or "drafter")


_ReadingTrain = Annotated[
    Annotated[ReadingTrainStage, Tag("drafter")] | Annotated[TargetTrainStage, Tag("target")], Discriminator(model)
]
ReadingStage = Annotated[
    GenerateStage | _ReadingTrain | RegenerateAnswersStage | CacheStage | ReadingEvaluateStage | PublishStage,
    Field(discriminator="kind"),
]
VisualStage = Annotated[
    GenerateCaptionedStage
    | EncodeStage
    | RegenerateStage
    | VisualTrainStage
    | VisualEvaluateStage
    | VisualPublishStage,
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


class ReadingRecipe(Recipe):
    """A head that reads a language model's states, over text, pictures and clips; or a drafter that is not trained."""

    target: TargetConfig
    drafter: Annotated[AnyReading | PrunedConfig, Field(discriminator="kind")] | None = None
    stages: dict[str, ReadingStage] = Field(min_length=1)


_LVLM: dict[str | None, type[Recipe]] = {"lvlm": LvlmRecipe}
_VISUAL: dict[str | None, type[Recipe]] = dict.fromkeys(("eagle", "medusa", "llamagen"), VisualRecipe)
_READING: dict[str | None, type[Recipe]] = dict.fromkeys((*READING_KINDS, "pruned"), ReadingRecipe)
# kind of target -> kind of drafter (None: no drafter) -> the recipe's schema.
TRACKS: dict[str, dict[str | None, type[Recipe]]] = {
    **{kind: {None: LvlmRecipe, **_LVLM, **_READING} for kind in FAMILIES},
    **{kind: {None: ReadingRecipe, **_READING} for kind in (*QWEN_KINDS, "causal_lm")},
    **{kind: {None: VisualRecipe, **_VISUAL} for kind in ("llamagen", "anole")},
}
