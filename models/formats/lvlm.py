"""TABED's draft LVLMs (`mjbooo/lvlm68m`, ...): a LLaVA of transformers 4 with ids that are not to be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...core.errors import UserError
from ..hub import config_value
from ..llava import grow_vocabulary
from ..targets.load import load_llava

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def import_lvlm(
    source: str, target: PreTrainedConfig, *, revision: str | None = None, ends: Sequence[int] = ()
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The draft in its own precision, with the target's ids and vocabulary.

    Args:
        target: the config of a LLaVA; one whose tokenizer has as many tokens is not therefore the same, which the
            tokenizer's hash tells.
        ends: that the target's generation config names.

    Raises:
        UserError: it cannot be read, or does not fit the target.
    """
    model = load_llava(source, revision=revision, dtype="auto", key="source", whole=True)
    ours, notes = model.config, []
    _check_eyes(ours, target, source)
    rows, have = target.text_config.vocab_size, ours.text_config.vocab_size
    if have > rows:
        raise UserError(f"{have} rows of vocabulary, the target has {rows}", where=source,
                        hint="give a target of the same tokenizer")  # fmt: skip
    if have < rows:
        kept = next(model.parameters()).dtype
        model.float()
        grow_vocabulary(model, rows, torch.Generator().manual_seed(0))
        cast(nn.Module, model).to(kept)
        notes.append(f"{rows - have} rows added near the mean, up to the target's vocabulary: they are never proposed")
    if ours.image_token_id != target.image_token_id:
        notes.append(f"its image token was {ours.image_token_id}, the target's is {target.image_token_id}")
        ours.image_token_id = ours.image_token_index = target.image_token_id
    for place, theirs in ((ours, target), (ours.text_config, target.text_config)):
        for name in _IDS:
            before, value = config_value(place, name), config_value(theirs, name)
            if before != value:
                notes.append(f"{name} was {before}, the target's is {value}")
                setattr(place, name, value)
    for name in _IDS:
        setattr(model.generation_config, name, config_value(target.text_config, name))
    if len(ends) > 1:
        model.generation_config.eos_token_id = list(ends)
    if model.dtype == torch.bfloat16:
        notes.append("stored in bfloat16: evaluate it in bfloat16, as its authors ask for lvlm160m-bf16")
    positions = ours.text_config.max_position_embeddings
    if positions < 4096:
        notes.append(
            f"{positions} positions, of which a picture takes {ours.image_seq_length}: longer prompts go past them"
        )
    return model, tuple(dict.fromkeys(notes))


def _check_eyes(ours: Any, target: Any, source: str) -> None:
    """Draft and target are shown the same pixels."""
    pairs = {
        "pixels along a side": (ours.vision_config.image_size, target.vision_config.image_size),
        "pixels along a patch": (ours.vision_config.patch_size, target.vision_config.patch_size),
    }
    for what, (mine, other) in pairs.items():
        if mine != other:
            raise UserError(f"its tower reads {mine} {what}, the target's {other}", where=source,
                            hint="give a target of its resolution: published drafts read 336 pixels")  # fmt: skip
