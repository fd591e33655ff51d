"""Drafts that no stage trains: published ones, or the results of other runs, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers.utils import cached_file

from ...core.errors import UserError
from ...core.section import Section
from ...data.processor import Processor
from ...eval.published import fetch
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

    One with our manifest is held to the target's tokenizer. What is published without one is taken at its
    word, as far as the sizes that must agree do.

    Args:
        target: the loaded target's model.

    Raises:
        UserError: it cannot be loaded, or does not fit the target.
    """
    key = f"drafters.{name}"
    dtype = getattr(torch, draft.dtype) if draft.dtype else target.dtype
    ours_at = _folder_of_ours(draft)
    if ours_at is not None:
        return load_drafter(ours_at, tokenizer_hash=processor.tokenizer_hash, dtype=dtype)
    model = load_llava(draft.path, revision=draft.revision, dtype=dtype, key=key, whole=True)
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


def _folder_of_ours(draft: PublishedDraft) -> Path | None:
    """Where a draft with our manifest lies, whole; None: it has none, or is out of reach, as loading it will tell."""
    if Path(draft.path).is_dir():
        return Path(draft.path) if (Path(draft.path) / MANIFEST).is_file() else None
    try:
        found = cached_file(
            draft.path, MANIFEST, revision=draft.revision, _raise_exceptions_for_missing_entries=False
        )  # fmt: skip
    except OSError:
        return None
    return None if found is None else fetch(draft.path, draft.revision)
