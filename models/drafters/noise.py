"""Noise on the features that a head is fed while it trains (EAGLE, section 4: it makes up for the head's own errors).

Letters: B samples, N positions, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_noise(features: Tensor, uniforms: Tensor, lengths: Tensor, width: float) -> Tensor:
    """[B,N,D] with EAGLE's noise: of `width` at 512 places, more for the shorter of `lengths` [B].

    Args:
        uniforms: [B,N,D] in [0, 1).
    """
    widths = width * 512 / lengths.to(features.dtype)
    return features + (uniforms - 0.5) * widths[:, None, None]


def row_uniforms(
    like: Tensor, padding: Sequence[int], seeds: Sequence[int], lengths: Sequence[int] | None = None
) -> Tensor:
    """[B,N,D] in [0, 1), as `like`; 1/2 (no noise) in each row's `padding` places on the left and behind its `lengths`.

    A row's draws follow from its seed and its own places: neither other rows nor the number of ranks change them.
    """
    assert len(seeds) == len(like), f"{len(like)} rows and {len(seeds)} seeds"
    uniforms = torch.full_like(like, 0.5)
    ends = lengths or [like.shape[1]] * len(like)
    for row, skipped, end, seed in zip(uniforms, padding, ends, seeds, strict=True):
        row[skipped:end].uniform_(generator=torch.Generator(like.device).manual_seed(seed))
    return uniforms
