"""Hidden states of the frozen target over whole sequences: what a head asks for, and what it is given.

Place p holds token x_p; H_p is the target's feature there (the post-final-norm state that feeds the LM head) and
M_p the state after some decoder layer (0: the embedding, which at a visual place is the projected picture).
Slot j pairs token x_{j+1} with the state of place j, and predicts H_{j+1}; it is visual where x_{j+1} is.
Letters: B rows, T places, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from .pictures import TEXT


@dataclass(frozen=True)
class StatesWanted:
    """What a head reads of the target; a source computes and a cache keeps this and no more."""

    feature: bool = True  # H at the places of `feature_places`
    text_layers: tuple[int, ...] = ()  # M after these layers at the same places (EAGLE-3's taps)
    visual_layers: tuple[int, ...] = ()  # M after these layers at visual places
    everywhere: bool = False  # H and the text layers at every place: every place is an ordinary slot (EAGLE)

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers to tap, in ascending order."""
        return tuple(sorted({*self.text_layers, *self.visual_layers}))


@dataclass(frozen=True)
class StatesBatch:
    """A micro-batch of sequences with the target's states, right padded; states that are not kept are zeros."""

    ids: Tensor  # [B,T] int64
    mask: Tensor  # [B,T] bool: the place is no padding
    loss_mask: Tensor  # [B,T] bool: the token is supervised (as a label, before any shift)
    modality: Tensor  # [B,T] int8
    positions: Tensor  # [1|3,B,T] int64, the target's own
    feature: Tensor | None  # [B,T,D]
    sample_ids: tuple[str, ...]
    layers: dict[int, Tensor] = field(default_factory=dict)  # layer -> [B,T,D]
    seeds: tuple[int, ...] = ()  # B: what a forward draws at random for a row comes from its seed

    def to(self, device: torch.device | str) -> StatesBatch:
        moved: dict[str, Any] = {
            f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved, layers={layer: states.to(device) for layer, states in self.layers.items()})

    @property
    def num_supervised(self) -> int:
        """Slots that are trained: those whose token is supervised. The first place has no slot before it."""
        return int(self.loss_mask[:, 1:].sum())


def feature_places(modality: Tensor, mask: Tensor, loss_mask: Tensor, everywhere: bool = False) -> Tensor:
    """[B,T] bool: places whose H is read by a text slot (the next token is text) or is a trained slot's goal.

    Args:
        everywhere: as of `StatesWanted`: all places that are no padding.
    """
    if everywhere:
        return mask.clone()
    text = (modality == TEXT) & mask
    read = torch.zeros_like(text)
    read[:, :-1] = text[:, 1:]
    return (read | (loss_mask & mask)) & mask


def visual_places(modality: Tensor, mask: Tensor) -> Tensor:
    """[B,T] bool."""
    return (modality != TEXT) & mask
