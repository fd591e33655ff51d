"""Packed rows of a `train` stage: what cannot be packed, and how long a row is."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.refused import Refused
from ...data.packing import check_lengths
from ..run.context import Context


def check_packing(stage: Any) -> None:
    """Refuse what has no rows of a known length before it is trained on."""
    if stage.packing is None:
        return
    if stage.micro_batch_size is not None:
        problem = "packing makes the rows of a forward, of packing.max_tokens"
        raise Refused("micro_batch_size", problem, "set micro_batch_size: null, or leave packing out")
    tokens = stage.packing.max_tokens
    if stage.data is not None and stage.data.max_length > tokens:
        problem = f"a row has {tokens} tokens and a sample up to {stage.data.max_length}"
        raise Refused("packing.max_tokens", problem, "set it to data.max_length or more")
    if stage.answers is not None and max(map(stage.answers.share, ("data", "target"))) < 1:
        problem = "the lengths of samples change with whose answers they have, and packing counts them once"
        raise Refused("packing", problem, "name one source in answers.shares, data or target")


def row_tokens(stage: Any, context: Context, lengths: np.ndarray) -> int | None:
    """Tokens of a packed row, which the longest of these samples must fit; None: the stage does not pack."""
    if stage.packing is None:
        return None
    check_lengths(lengths, stage.packing.max_tokens, f"key stages.{context.name}.packing.max_tokens")
    return stage.packing.max_tokens
