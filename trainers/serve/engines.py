"""The engines that a recipe can name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .engine_section import SglangEngine, VllmEngine
from .target_engine import TransformersEngine

EngineSection = Annotated[TransformersEngine | VllmEngine | SglangEngine, Field(discriminator="kind")]
