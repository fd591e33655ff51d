"""The engines that a recipe can name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .engine_section import VllmEngine, VllmEvaluation
from .target_engine import TransformersEngine

# Of stages that want the target's answers or states.
EngineSection = Annotated[TransformersEngine | VllmEngine, Field(discriminator="kind")]
# Of an evaluation.
EvaluationEngine = Annotated[TransformersEngine | VllmEvaluation, Field(discriminator="kind")]
