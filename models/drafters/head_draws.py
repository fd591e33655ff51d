"""Random draws of training, from each row's seed: the same beside any other rows and on any number of ranks.

Letters: B rows, T places, N inputs that a row keeps, D width.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.batch import Batch
from ...core.pictures import TEXT


def is_blind(seed: int, share: float) -> bool:
    """Whether the row of this seed is one of the `share` without visual inputs; apart from what else the seed draws."""
    return random.Random(f"blind/{seed}").random() < share


def visual_mask(batch: Batch, share: float, blind_share: float) -> Tensor:
    """[B,T] bool: visual tokens whose inputs this epoch keeps, a `share` of each row's and none of blind rows."""
    assert len(batch.seeds) == len(batch.ids), "visual inputs are drawn from each row's seed"
    keep = torch.full(batch.ids.shape, share == 1, dtype=torch.bool)
    if share < 1:
        visual = (batch.on_host("modality") != TEXT) & batch.on_host("attention_mask")
        for row, seed in enumerate(batch.seeds):
            places = visual[row].nonzero()[:, 0]
            order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
            keep[row, places[order[: round(share * len(places))]]] = True
    keep[[is_blind(seed, blind_share) for seed in batch.seeds]] = False
    return keep


def gaps_of(seeds: Sequence[int], share: float, most: int) -> list[int | None]:
    """Each row's gap in places before the text after its last picture, up to `most`; None: it has none."""
    gaps: list[int | None] = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        drawn = float(torch.rand((), generator=generator)) < share
        gap = int(torch.randint(most + 1, (), generator=generator))
        gaps.append(gap if drawn else None)
    return gaps


def add_noise(features: Tensor, uniforms: Tensor, lengths: Tensor, width: float) -> Tensor:
    """[B,N,D] with EAGLE's noise of `uniforms` in [0, 1): of `width` at 512 places, more for shorter `lengths` [B]."""
    widths = width * 512 / lengths.to(features.dtype)
    return features + (uniforms - 0.5) * widths[:, None, None]


def row_uniforms(
    like: Tensor, padding: Sequence[int], seeds: Sequence[int], lengths: Sequence[int] | None = None
) -> Tensor:
    """[B,N,D] in [0, 1), as `like`; 1/2 (no noise) in a row's `padding` places on the left and after its `lengths`."""
    assert len(seeds) == len(like), f"{len(like)} rows and {len(seeds)} seeds"
    uniforms = torch.full_like(like, 0.5)
    ends = lengths or [like.shape[1]] * len(like)
    for row, skipped, end, seed in zip(uniforms, padding, ends, seeds, strict=True):
        row[skipped:end].uniform_(generator=torch.Generator(like.device).manual_seed(seed))
    return uniforms
