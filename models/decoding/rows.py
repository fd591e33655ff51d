"""Rows: several views of one request in one batch, where each stands in a cache, and guidance over two of them.

Letters: R rows, F nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from ...core.states import uploaded
from .cache import Cache


class Places:
    """Positions of left-padded rows in one cache. All rows end at the same index, and each row counts its own
    positions.

    What depends only on the prompts is computed once, on the device, because a draft step is short.

    Args:
        rope_deltas: each row's M-RoPE delta: its positions minus its cache indices; None: they are equal.
    """

    def __init__(
        self, lengths: Sequence[int], capacity: int, device: torch.device, rope_deltas: Sequence[int] | None = None
    ):
        self.count, prefix = len(lengths), max(lengths)
        shifts = rope_deltas or [0] * self.count
        self._shift = torch.tensor(
            [[prefix - n - shift] for n, shift in zip(lengths, shifts, strict=True)], device=device
        )  # [R,1]
        self._padding = torch.tensor([[prefix - n] for n in lengths], device=device)  # [R,1]
        padded = any(n < prefix for n in lengths)
        self._visible = (torch.arange(capacity, device=device) >= self._padding)[:, None] if padded else None  # [R,1,L]

    def positions(self, places: Tensor) -> Tensor:
        """[R,N] of new tokens at `places` [N] of the cache."""
        return places - self._shift

    def mask(self, count: int, total: int, mask: Tensor | None) -> Tensor | None:
        """The mask of `count` new tokens, the last of `total` places: `mask` [N,K] over the last K (None: causal).

        Padding is hidden. Without padding the mask is returned unchanged.
        """
        if self._visible is None:
            return mask
        visible = self._visible[:, :, :total]
        if count == 1 and mask is None:
            return visible
        if mask is None:
            mask = torch.ones(count, count, dtype=torch.bool, device=visible.device).tril()
        full = visible.repeat(1, count, 1)
        full[:, :, total - mask.shape[-1] :] &= mask
        return full


def stacked(caches: Sequence[Cache], capacity: int) -> Cache:
    """One cache of a model of transformers with a row for each of several single-row caches; their committed positions
    end at the same index.
    """
    from .model_cache import ModelCache

    joint, prefix = ModelCache(len(caches[0].layers), capacity), max(cache.length for cache in caches)
    for layer, *parts in zip(joint.kv_layers, *(cache.kv_layers for cache in caches), strict=True):
        like = parts[0].keys, parts[0].values
        layer.lazy_initialization(*(part[:, :, :1].expand(len(caches), -1, -1, -1) for part in like))
        for row, part in enumerate(parts):  # the padding before them must stay masked
            layer.keys[row, :, prefix - part.length : prefix] = part.keys[0, :, : part.length]
            layer.values[row, :, prefix - part.length : prefix] = part.values[0, :, : part.length]
    joint.crop_to(prefix)
    return joint


def guide(scores: Tensor, scale: float, *, banned: bool = True) -> Tensor:
    """Classifier-free guidance of scores [2,F,V], with and without the condition: uncond + s (cond - uncond), [F,V].

    To look for scores of minus infinity (`banned`) takes ten times as long as the arithmetic.
    """
    cond, uncond = scores
    guided = (cond - uncond).mul_(scale).add_(uncond)
    # Ids that must not come have minus infinity on both sides, and their difference is not a number.
    return guided.masked_fill(cond.isneginf() | uncond.isneginf(), float("-inf")) if banned else guided


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance of an image generator, the same for target and drafter.

    With `interval` >= 0 only the first tokens are guided: token t uses the conditional scores alone as soon as
    t - 1 > interval (LlamaGen's `cfg_interval`, whose loop starts at the second image token). -1 guides always.
    A scale up to 1 is no guidance: the conditional scores alone, whether or not the unconditional ones were run.
    """

    scale: float = 1.0
    interval: int = -1

    def __post_init__(self) -> None:
        assert not 0 < self.scale < 1, f"scale {self.scale}: see GuidanceScale"

    @property
    def num_rows(self) -> int:
        """LlamaGen runs one row where guidance would change nothing."""
        return 2 if self.scale > 1.0 else 1

    def __call__(self, scores: Tensor, steps: Sequence[int], *, banned: bool = True) -> Tensor:
        """[R,F,V] -> [F,V]; node f scores image token number `steps[f]` (from 0). `banned` as of `guide`."""
        if scores.shape[0] == 1 or self.num_rows == 1:
            return scores[0]
        alone = [step - 1 > self.interval >= 0 for step in steps]
        if all(alone):
            return scores[0]
        guided = guide(scores, self.scale, banned=banned)
        if not any(alone):
            return guided
        return torch.where(uploaded(torch.tensor(alone), scores.device)[:, None], scores[0], guided)


def _guides_or_not(scale: float) -> float:
    if 0 < scale < 1:
        raise ValueError("between 0 and 1 nothing would be guided; use 1 (or 0) for no guidance, or a scale above 1")
    return scale


# A recipe's `cfg_scale`. Raises where it is negative or strictly between 0 and 1.
GuidanceScale = Annotated[float, Field(ge=0), AfterValidator(_guides_or_not)]
