"""The class of Gemma 4 that is loaded: transformers', without what nothing here reads."""

from __future__ import annotations

import copy
from typing import Any

import transformers

from .model import check_text


class Gemma4ForConditionalGeneration(transformers.Gemma4ForConditionalGeneration):  # type: ignore[misc]
    """transformers' class, without the tower of sounds: E2B and E4B have one, and nothing here reads it."""

    def __init__(self, config: Any):
        check_text(config.get_text_config())  # before any weight is read
        if config.audio_config is not None:
            config = copy.deepcopy(config)
            config.audio_config = None
        super().__init__(config)
        left_out = self._keys_to_ignore_on_load_unexpected or ()
        self._keys_to_ignore_on_load_unexpected = {*left_out, r"audio_tower\.", r"embed_audio\."}
