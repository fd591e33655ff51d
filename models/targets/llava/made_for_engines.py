"""A draft LLaVA as a serving engine can run it: on the target's projected features, and without a prompt's first token.

An engine hands a draft the target's projected pictures and no others, and its EAGLE path ids one further on. What the
draft was made for stands in its `config.json`, section `draftsmith`; a folder without it is a plain LLaVA.
Letters: I tiles, P patches, C width of the tower, E the target's width, D the draft's.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ....core.errors import UserError
from ...hub import config_value

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ProjectorInput = Literal["tower", "projected"]
_SECTION = "draftsmith"


@dataclass(frozen=True)
class Reading:
    """Args:
    projector_input: what the draft's projector reads: the tower's states, or what the target's projector made of them.
    first_token: the draft reads a prompt's first token.
    target_width: E, where the projector reads the target's projected features.
    """

    projector_input: ProjectorInput = "tower"
    first_token: bool = True
    target_width: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether transformers' own class is all that the draft is."""
        return self.projector_input == "tower"

    @property
    def lines(self) -> list[str]:
        """Lines of a dry run: what the draft reads otherwise than a plain LLaVA."""
        words = [] if self.is_plain else ["its projector reads the target's projected features"]
        words += [] if self.first_token else ["a prompt's first token is left out"]
        return [f"  {'; '.join(words)}"] if words else []

    def write(self, config: PreTrainedConfig) -> None:
        """Into a draft's config; the defaults leave it as it is."""
        if self != Reading():
            setattr(config, _SECTION, asdict(self))


def reading_of(config: PreTrainedConfig) -> Reading:
    """Return what a model's config says of how a draft reads; the defaults where it says nothing."""
    return Reading(**(config_value(config, _SECTION) or {}))


def reading_beside(target: PreTrainedConfig, projector_input: ProjectorInput, first_token: bool) -> Reading:
    """Return how a draft reads beside a target. Raises `UserError` for projected features that are no LLaVA-1.5's."""
    if projector_input == "tower":
        return Reading(first_token=first_token)
    if target.model_type != "llava" or config_value(target, "projector_hidden_act") != "gelu":
        raise UserError(
            f"the projected features of a {target.model_type} are read by no draft",
            key="drafter.projector_input",
            hint="LLaVA-1.5's are; for other targets use projector_input: tower",
        )
    return Reading("projected", first_token, target.text_config.hidden_size)


class _Projector(nn.Module):
    """Linear, activation, linear, as LLaVA's: [...,n] -> [...,D]."""

    def __init__(self, inputs: int, width: int, activation: str):
        from transformers.activations import ACT2FN

        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(inputs, width), nn.Linear(width, width)
        self.act = ACT2FN[activation]

    def forward(self, features: Tensor) -> Tensor:
        """Project features."""
        return self.linear_2(self.act(self.linear_1(features)))


class TwoProjectors(_Projector):
    """The target's projector, frozen, and the draft's own on what it makes: [I,P,C] -> [I,P,E] -> [I,P,D]."""

    def __init__(self, tower: int, target: int, width: int, activation: str):
        super().__init__(target, width, activation)
        self.target = _Projector(tower, target, activation).requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        """Project the tower's features."""
        return super().forward(self.target(features))


@functools.cache
def on_projected() -> type[PreTrainedModel]:
    """transformers' LLaVA with two projectors. The plain class refuses the weights: the first reads another width."""
    from transformers import LlavaForConditionalGeneration

    class LlavaOnProjected(LlavaForConditionalGeneration):
        """A draft LLaVA that reads a target's projected features."""

        def __init__(self, config: Any):  # a `LlavaConfig`
            super().__init__(config)
            width = reading_of(config).target_width
            assert width is not None
            self.model.multi_modal_projector = TwoProjectors(
                config.vision_config.hidden_size, width, config.text_config.hidden_size, config.projector_hidden_act
            )

    return LlavaOnProjected


def trained_projector(model: PreTrainedModel) -> nn.Module:
    """The projector that a draft or target learns: without a target's inside a draft's."""
    whole: nn.Module = model.model.multi_modal_projector
    if not isinstance(whole, TwoProjectors):
        return whole
    return nn.ModuleDict({"linear_1": whole.linear_1, "linear_2": whole.linear_2})
