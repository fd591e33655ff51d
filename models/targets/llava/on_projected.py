"""A draft LLaVA that reads a target's projected features, as a class of transformers."""

from __future__ import annotations

from typing import Any

from transformers import LlavaForConditionalGeneration

from .made_for_engines import TwoProjectors, reading_of


class LlavaOnProjected(LlavaForConditionalGeneration):
    """transformers' LLaVA with two projectors. The plain class refuses the weights: the first reads another width."""

    def __init__(self, config: Any):  # a `LlavaConfig`
        super().__init__(config)
        width = reading_of(config).target_width
        assert width is not None
        self.model.multi_modal_projector = TwoProjectors(
            config.vision_config.hidden_size, width, config.text_config.hidden_size, config.projector_hidden_act
        )
