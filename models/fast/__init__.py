"""Functions that are faster or need less memory than readable ones, and say less.

Each file stands in for functions that stand in the method's own file, and that `DRAFTSMITH_FAST=0` runs instead. A test
holds each pair equal. `STANDS_IN_FOR` is the table of the pairs.
"""

from __future__ import annotations

import os

# File of this folder -> the file and the functions that it stands in for, and when.
STANDS_IN_FOR = {
    "pass_attention": ("models/training_passes.py", ["TrainingPasses.attend"], "rows are long: for memory"),
    "in_place": ("models/losses.py", ["soft_cross_entropy", "divergence", "head_loss"], "for memory and its traffic"),
    "causal_blocks": ("models/drafters/dflash_training.py", ["block_mask"], "for memory, and less read in vain"),
    "cuda_graphs": ("models/decoding/decoder.py", ["CachedDecoder.forward"], "a GPU waits for the host's launches"),
}


def enabled() -> bool:
    """Whether the fast forms stand in for the readable ones."""
    return os.environ.get("DRAFTSMITH_FAST", "1") != "0"
