"""Packed rows of a `train` stage: what cannot be packed, and how long a row is."""

from __future__ import annotations

import numpy as np

from ...data.packing import check_lengths
from ..run.context import Context
from .settings import RecordsSettings, StatesSettings


def row_tokens(stage: StatesSettings | RecordsSettings, context: Context, lengths: np.ndarray) -> int | None:
    """Tokens of a packed row, which the longest of these samples must fit; None: the stage does not pack."""
    if stage.packing is None:
        return None
    check_lengths(lengths, stage.packing.max_tokens, f"stages.{context.name}.packing.max_tokens")
    return stage.packing.max_tokens
