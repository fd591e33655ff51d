"""What the passes of a head in CUDA graphs are rounded to, and where they cannot be; `recursion.py` runs them.

A head is one layer and an LM head, some sixty kernels for a few nodes: the host is what it waits for.
"""

from __future__ import annotations

from typing import Any

from ..decoding.captured import why_nowhere
from ..targets.base import Target

# Inputs of a pass. EAGLE's trees expand ten nodes at once, and paths are a few tokens long.
COUNTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)
# Of a cycle: the dry run counts the outputs of so many.
MOST_EXPANSIONS = 256


def why_not(target: Target) -> str | None:
    """Why no head can be captured beside this target, whose embedding and LM head its passes read; None: it can."""
    decoder: Any = getattr(target, "decoder", target)  # image generators may be one themselves
    if getattr(getattr(target, "guidance", None), "interval", -1) >= 0:
        return "guidance ends within a picture, so that scores depend on the token's number"
    return why_nowhere(decoder.model.parameters(), target.device)
