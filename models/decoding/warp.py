"""Turns scores into the distribution that is decoded from: temperature, then top-k, then top-p.

The order is fixed (design vocabulary); ensembles mix after the temperature and before the truncation,
which is why the two steps are apart. Letters: N positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Warp:
    """Decoding settings. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep everything."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        """Whether decoding takes the likeliest token."""
        return self.temperature == 0.0

    def apply_temperature(self, logits: Tensor) -> Tensor:
        """Probabilities [...,V] float32 after the temperature. Greedy decoding uses temperature 1 here."""
        logits = logits.float()
        return torch.softmax(logits if self.greedy else logits / self.temperature, dim=-1)

    def truncate(self, probs: Tensor) -> Tensor:
        """Top-k, then top-p, renormalised. Greedy decoding needs only the largest entry, so nothing is cut."""
        if self.greedy:
            return probs
        if 0 < self.top_k < probs.shape[-1]:
            floor = probs.topk(self.top_k, dim=-1).values[..., -1:]
            probs = _normalised(probs.where(probs >= floor, 0.0))
        if self.top_p < 1.0:
            ranked, order = probs.sort(dim=-1, descending=True)
            # A token is kept while the mass before it is below top_p: the most likely one always is.
            nucleus = ranked.where(ranked.cumsum(-1) - ranked < self.top_p, 0.0)
            probs = _normalised(torch.zeros_like(probs).scatter(-1, order, nucleus))
        return probs

    def __call__(self, logits: Tensor) -> Tensor:
        return self.truncate(self.apply_temperature(logits))

    def cut(self, ranked: Tensor) -> Tensor:
        """Probabilities [...,k] of the k likeliest tokens, likeliest first, with zeros where top-k and top-p leave
        nothing.

        They are renormalised where what is left lies within the k, as `truncate` would. Where it reaches further, they
        stay as they are: the sum that `truncate` divides by takes a sort of the whole vocabulary.
        """
        if self.greedy:
            return ranked
        if 0 < self.top_k <= ranked.shape[-1]:
            zeros = torch.zeros_like(ranked[..., self.top_k :])
            ranked = _normalised(torch.cat([ranked[..., : self.top_k], zeros], dim=-1))
        if self.top_p < 1.0:
            before = ranked.cumsum(-1) - ranked
            nucleus = ranked.where(before < self.top_p, 0.0)
            within = ranked.sum(-1, keepdim=True) >= self.top_p
            ranked = torch.where(within, _normalised(nucleus), nucleus)
        return ranked


def _normalised(probs: Tensor) -> Tensor:
    """Rows of sum 1. On a CPU, a row of zeros (a drafter found nothing to propose) stays one."""
    total = probs.sum(-1, keepdim=True)
    return probs / (total.where(total > 0, 1.0) if probs.device.type == "cpu" else total)


class Distributions:
    """The warped distributions of N rows of scores [N,V], computed when they are read.

    A rule visits few nodes of a tree, and to warp a row costs as much as a layer of a small target. On a CPU each row
    is warped when it is read; elsewhere all are at once, before the host waits for what it visits.
    """

    def __init__(self, scores: Tensor, warp: Warp | None = None):
        """`warp` None: `scores` are the distributions themselves, or what greedy decoding takes the largest of."""
        self._scores, self._warp = scores, warp
        self._all = scores if warp is None else None
        self._rows: dict[int, Tensor] = {}

    @classmethod
    def of(cls, p: Tensor | Distributions) -> Distributions:
        """Distributions given as a tensor [N,V], or as they are."""
        return p if isinstance(p, cls) else cls(p)  # type: ignore[arg-type]

    @property
    def one_by_one(self) -> bool:
        """Whether reading a row makes nobody wait, so that rows are made as they are visited."""
        return self._scores.device.type == "cpu"

    @property
    def device(self) -> torch.device:
        """Their device."""
        return self._scores.device

    def whole(self) -> Tensor:
        """All of them, [N,V]."""
        if self._all is None:
            assert self._warp is not None
            self._all = self._warp(self._scores)
        return self._all

    def row(self, number: int) -> Tensor:
        """One of them, [V]."""
        if self._all is not None or not self.one_by_one:
            return self.whole()[number]
        if number not in self._rows:
            assert self._warp is not None
            self._rows[number] = self._warp(self._scores[number])
        return self._rows[number]
