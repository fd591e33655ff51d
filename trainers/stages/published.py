"""Drafts that no stage trains: published ones, or the results of other runs, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from ...core.errors import UserError
from ...core.section import Section
from ...data.processor import Processor
from ...models.drafters.lvlm import MANIFEST, load_drafter
from ...models.targets.load import load_llava


class PublishedDraft(Section):
    """A draft LVLM with weights of its own."""

    # Hub id, or a directory (the folder of a stage that trained one).
    path: str
    revision: str | None = None
    # null: the target's. mjbooo/lvlm160m-bf16 wants bfloat16.
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


def load_published(name: str, draft: PublishedDraft, processor: Processor, target: Any) -> Any:
    """The draft's model, in the target's precision unless it has its own.

    A directory with our manifest is held to the target's tokenizer. What is published without one is taken at its
    word, as far as the sizes that must agree do.

    Args:
        target: the loaded target's model.

    Raises:
        UserError: it cannot be loaded, or does not fit the target.
    """
    key = f"drafters.{name}"
    dtype = getattr(torch, draft.dtype) if draft.dtype else target.dtype
    if (Path(draft.path) / MANIFEST).is_file():
        return load_drafter(Path(draft.path), tokenizer_hash=processor.tokenizer_hash, dtype=dtype)
    model = load_llava(draft.path, revision=draft.revision, dtype=dtype, key=key)
    ours, theirs = model.config, target.config
    pairs = {
        "vocabulary": (ours.text_config.vocab_size, theirs.text_config.vocab_size),
        "image token": (ours.image_token_id, theirs.image_token_id),
        "picture's side": (ours.vision_config.image_size, theirs.vision_config.image_size),
        "patch": (ours.vision_config.patch_size, theirs.vision_config.patch_size),
    }
    for what, (mine, other) in pairs.items():
        if mine != other:
            raise UserError(
                f"the {what} of {draft.path!r} is {mine}, the target's {other}", where=f"key {key}",
                cure="give a draft that was trained for targets of this vocabulary and resolution",
            )  # fmt: skip
    return model
