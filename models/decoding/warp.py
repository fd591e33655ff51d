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
            probs = probs.where(probs >= floor, 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        if self.top_p < 1.0:
            ranked, order = probs.sort(dim=-1, descending=True)
            # A token is kept while the mass before it is below top_p: the most likely one always is.
            kept = ranked.where(ranked.cumsum(-1) - ranked < self.top_p, 0.0)
            probs = torch.zeros_like(probs).scatter(-1, order, kept)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

    def __call__(self, logits: Tensor) -> Tensor:
        return self.truncate(self.apply_temperature(logits))
