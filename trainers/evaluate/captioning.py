"""What an `evaluate` stage puts where a picture was: a newline, the letters of its mark, or a captioner's words."""

from __future__ import annotations

from typing import Any

import torch

from ...core.pictures import Picture
from ...data.conversations import PromptFormat, encode
from ...data.end_tokens import end_ids
from ...data.families.processor import Processor
from ...models.drafters.captioners import Captioner, LvlmCaptioner, LvlmCaptions, load_captioner
from ...models.drafters.lvlm import load_drafter
from ...models.drafters.modes import ImageSubstitutes
from ...models.targets.table import family_of
from ..run.context import Context
from .evaluate_settings import EvaluateSettings


def substitutes_of(stage: EvaluateSettings, context: Context, processor: Processor) -> ImageSubstitutes:
    """For the modes of an `evaluate` stage's methods."""
    captioner = None if stage.captioner is None else _captioner(stage.captioner, stage.format, context, processor)
    return ImageSubstitutes.of(processor.tokenizer, newline_id=processor.newline_id, captioner=captioner)


def _captioner(config: Any, form: PromptFormat, context: Context, processor: Processor) -> Captioner:
    """A published captioner, or the one that an earlier stage trained, asked in the stage's own prompt format."""
    if not isinstance(config, LvlmCaptions):
        return load_captioner(config, context.device())
    folder, device = context.inputs["captioner"], context.device()
    model = load_drafter(folder, tokenizer_hash=processor.tokenizer_hash, dtype=torch.float32, device=device)
    turns = [{"from": "human", "value": config.prompt}, {"from": "gpt", "value": "-"}]
    # The captioner is built like the drafter and uses the drafter's image processor.
    patches = (context.own_image_processor() or processor).patches
    asked = encode(turns, form, processor, pictures=[Picture(patches)], open_ended=True)
    never = (processor.image_token_id,)
    decoder = family_of(model.config).decoder(model, num_token_ids=processor.num_token_ids, never=never)
    return LvlmCaptioner(
        decoder,
        asked.ids,
        image_token_id=processor.image_token_id,
        stop_ids=end_ids(processor, form),
        tokenizer=processor.tokenizer,
        max_new_tokens=config.max_new_tokens,
    )
