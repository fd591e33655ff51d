"""What an `evaluate` stage puts where a picture was: a newline, the letters of its mark, or a captioner's words."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.pictures import Picture
from ...data.conversations import PromptFormat, encode
from ...data.processor import Processor
from ...models.captioners import Captioner, LvlmCaptioner, LvlmCaptions, load_captioner
from ...models.decoding.decoder import CachedDecoder
from ...models.drafters.lvlm import load_drafter
from ...models.drafters.modes import StandIns
from ..context import Context


def stand_ins(stage: Any, context: Context, processor: Processor) -> StandIns:
    """For the modes of an `evaluate` stage's methods."""
    captioner = None if stage.captioner is None else _captioner(stage.captioner, stage.format, context, processor)
    return StandIns.of(processor.tokenizer, newline_id=processor.newline_id, captioner=captioner)


def _captioner(config: Any, form: PromptFormat, context: Context, processor: Processor) -> Captioner:
    """A published captioner, or the one that an earlier stage trained, asked in the stage's own prompt format."""
    if not isinstance(config, LvlmCaptions):
        return load_captioner(config, context.device())
    model = load_drafter(context.inputs["captioner"], tokenizer_hash=processor.tokenizer_hash, dtype=torch.float32)
    nn.Module.to(model, context.device())
    turns = [{"from": "human", "value": config.prompt}, {"from": "gpt", "value": "-"}]
    # It is a model like the drafter, and has the drafter's eyes.
    patches = (context.own_eyes() or processor).patches
    asked = encode(turns, form, processor, pictures=[Picture(patches)], open_ended=True)
    decoder = CachedDecoder(model, num_token_ids=len(processor.tokenizer), never=(processor.image_token_id,))
    return LvlmCaptioner(
        decoder,
        asked.ids,
        image_token_id=processor.image_token_id,
        stop_ids=(processor.eos_id,),
        tokenizer=processor.tokenizer,
        max_new_tokens=config.max_new_tokens,
    )
