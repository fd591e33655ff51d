"""HiViS: no visual token in training or decoding."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from ...core.json_types import JsonObject
from ..layer import LayerShape
from .base import HeadObjective
from .head_config import VISUAL_STAGE, FusedHeadConfig, exports_as_eagle
from .head_module import FusedHead, StateHead
from .head_settings import Visual


class HivisConfig(FusedHeadConfig):
    """A HiViS head."""

    kind: Literal["hivis"]
    input_norm: bool | None = True
    positions: Literal["compact", "flat", "mrope"] = "compact"
    mtp_steps: int = Field(1, ge=0, le=64)
    # Number of learned vectors, added by a state's distance from the last true state; 0: none.
    num_steps: int = Field(0, ge=0, le=64)

    default_objective: ClassVar[HeadObjective] = VISUAL_STAGE

    def visual(self, *, training: bool) -> Visual:
        return "none"

    def module(self, layer: LayerShape, draft_ids: Tensor | None) -> StateHead:
        return HivisHead(layer, draft_ids, fc_bias=self.fc_bias, num_steps=self.num_steps)

    def written_settings(self) -> JsonObject:
        return super().written_settings() | {"num_steps": self.num_steps}

    def exports(self, engine: str) -> list[str]:
        reasons = exports_as_eagle(engine)
        if engine == "eagle":
            reasons.append("hivis has no published code that would read it")
        if self.num_steps:
            reasons.append("it adds a vector for each step (HiViS), which no server has")
        return reasons


class HivisHead(FusedHead):
    """Adds a learned vector for each step after the last true state."""

    def __init__(self, shape: LayerShape, draft_ids: Tensor | None = None, *, fc_bias: bool = True, num_steps: int = 0):
        super().__init__(shape, draft_ids, fc_bias=fc_bias)
        self.num_steps = num_steps
        if num_steps:
            self.steps = nn.Embedding(num_steps, shape.hidden_size)
            nn.init.zeros_(self.steps.weight)

    def joined(self, embeds: Tensor, states: Tensor, image: Tensor | None, depths: Tensor | None) -> Tensor:
        """Add the step vector of each input's depth, if there are any; larger depths take the last vector."""
        inputs = super().joined(embeds, states, image, depths)
        if not self.num_steps:
            return inputs
        assert depths is not None
        return inputs + self.steps(depths.clamp(max=self.num_steps - 1))
