"""Packing: the samples of a batch one after the other in a single row without padding, each attending to itself alone.

A packed `Batch` is laid out as any other; models put its tokens into one row while they run and spread what comes out,
so pictures, labels, positions and seeds are those of the padded batch. Our attention is told where samples begin and
runs each alone; for flash and eager attention transformers' decoders see where token indices begin anew.
Letters: B samples, T tokens, M tokens without padding, D width, n coordinates of positions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.batch import Batch
from ..core.states import uploaded
from .attention import GROUPED, use_attend
from .hub import recurrent_layers, sees_window

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class PackedRow:
    """The places of a batch's tokens in the row."""

    shape: tuple[int, int]  # B, T
    places: Tensor  # [M] int64 in the flattened batch
    segments: Tensor  # [M] int64 number of each token's sample, ascending
    indices: Tensor  # [M] int64 token index within its sample
    real: Tensor  # [B,T] bool, on the CPU: no padding
    bounds: Tensor  # [1,1,1,S+1] int64, on the CPU: where each of S samples begins, and the last one's end

    @classmethod
    def of(cls, mask: Tensor, device: torch.device) -> PackedRow:
        """Lay out a batch whose `mask` [B,T] bool, on the CPU, is True at its tokens; it is padded on the right."""
        places = uploaded(mask.flatten().nonzero()[:, 0], device)
        width, lengths = mask.shape[1], mask.sum(1)
        bounds = F.pad(lengths[lengths > 0].cumsum(0), (1, 0))[None, None, None]
        return cls((mask.shape[0], width), places, places // width, places % width, mask, bounds)

    def pack(self, values: Tensor) -> Tensor:
        """[B,T,...] -> [1,M,...]."""
        return values.flatten(0, 1)[self.places][None]

    def spread(self, states: Tensor) -> Tensor:
        """[1,M,...] -> [B,T,...], zero at padding."""
        rows, width = self.shape
        empty = states.new_zeros(rows * width, *states.shape[2:])
        return empty.index_copy(0, self.places, states[0]).unflatten(0, self.shape)

    @property
    def numbers(self) -> Tensor:
        """[M] int64 on the CPU: `segments`."""
        return self.real.nonzero()[:, 0]

    @property
    def mask(self) -> Tensor:
        """[M,M] bool: each token sees its own sample up to itself."""
        return (self.segments[:, None] == self.segments).tril()


def last_states(decoder: Any, batch: Batch, embeds: Tensor, positions: Tensor, **more: Tensor | list[Tensor]) -> Tensor:
    """Final states [B,T,D] of a decoder of transformers over the embeddings [B,T,D] of a batch, packed or padded, at
    positions [B,T] or [3,B,T] (M-RoPE). It takes `more` as it is.
    """
    run = functools.partial(decoder, use_cache=False)
    # In one row with others a sample would begin with their recurrent states.
    if not batch.packed or recurrent_layers(decoder.config):
        return run(inputs_embeds=embeds, **_padded(decoder, batch, positions), **more).last_hidden_state
    row = PackedRow.of(batch.on_host("attention_mask"), embeds.device)
    if positions.dim() == 3:
        # Qwen-VL's decoders read a fourth row of positions: token indices, by which they tell samples apart.
        packed = torch.stack([row.indices[None], *(row.pack(part) for part in positions)])
    else:
        packed = row.pack(positions)
    # Without a mask transformers asks the device whether token indices begin anew.
    mask = row.bounds if reads_bounds(decoder.config, embeds) else None
    if mask is None and _takes_a_mask(decoder.config):
        mask = row.mask[None, None]
    made = run(inputs_embeds=row.pack(embeds), attention_mask=mask, position_ids=packed, **more)
    return row.spread(made.last_hidden_state)


def _padded(decoder: Any, batch: Batch, positions: Tensor) -> dict[str, Tensor]:
    """Mask and positions as the decoder would make them of a mask [B,T]; none where rows are whole.

    transformers asks the device whether a mask hides anything, in every forward. The host knows.
    """
    mask = batch.attention_mask
    if not _takes_a_mask(decoder.config):
        return {"attention_mask": mask.long(), "position_ids": positions}
    length = mask.shape[1]
    if bool(batch.on_host("attention_mask").all()):
        if positions.dim() == 3:
            return {"position_ids": positions}
        if bool((batch.on_host("positions")[0] == torch.arange(length)).all()):
            return {}
    visible = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril() & mask[:, None, None]
    return {"attention_mask": visible, "position_ids": positions}


def runs_samples(states: Tensor) -> bool:
    """Whether attention over these states runs the samples of a row one by one, or all in one launch."""
    return states.device.type == "cpu" or states.element_size() == 2


def reads_bounds(config: PreTrainedConfig, states: Tensor) -> bool:
    """Whether a decoder's attention over these states reads `PackedRow.bounds` for a mask; one that ran sdpa does from
    now on, so that layers that run again for their gradients do.
    """
    if not (_takes_a_mask(config) and runs_samples(states)):
        return False
    use_attend(config)
    return True


def _takes_a_mask(config: PreTrainedConfig) -> bool:
    """Whether all layers read one boolean mask [B,1,T,T]: torch's attention, and no sliding windows."""
    return config._attn_implementation in ("sdpa", GROUPED) and not sees_window(vars(config))
