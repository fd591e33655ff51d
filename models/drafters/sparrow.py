"""Sparrow: visual tokens are middle-layer states in training (IVSB), and absent in decoding (VATA)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ..targets.base import TargetShape
from .base import HeadObjective
from .head_config import VISUAL_STAGE, DirectHeadConfig


class SparrowConfig(DirectHeadConfig):
    """A Sparrow head (Sparrow, section 4); its two stages are TEXT_STAGE and VISUAL_STAGE."""

    kind: Literal["sparrow"]
    # Present: middle states are not normed.
    input_norm: bool | None = True
    vata: bool = True
    positions: Literal["compact", "flat", "mrope"] = "compact"
    mtp_steps: int = Field(1, ge=0, le=64)
    # Visual inputs of training hold middle states; false: embeddings.
    ivsb: bool = True
    # Layers that those states have passed; null: half of the target's, at least one.
    middle_layer: int | None = Field(None, ge=1)

    default_objective: ClassVar[HeadObjective] = VISUAL_STAGE

    @property
    def parts(self) -> dict[str, bool]:
        return super().parts | {"IVSB": self.ivsb and self.visual(training=True) == "direct"}

    def visual_layer(self, shape: TargetShape, *, training: bool) -> int | None:
        """Return the middle layer with `ivsb`, else 0; None where there are no direct visual inputs."""
        if self.visual(training=training) != "direct":
            return None
        if not self.ivsb:
            return 0
        layer = self.middle_layer or max(1, shape.num_layers // 2)
        if not 1 <= layer <= shape.num_layers:
            raise UserError(
                f"drafter.middle_layer is {layer}, and the target has {shape.num_layers} layers",
                key="drafter.middle_layer",
                hint="leave it null for half of them",
            )
        return layer

    def written_settings(self) -> JsonObject:
        return super().written_settings() | {"ivsb": self.ivsb}

    def exports(self, engine: str) -> list[str]:
        if engine == "eagle":
            return [*super().exports(engine), "sparrow has no published code that would read it"]
        return super().exports(engine)
